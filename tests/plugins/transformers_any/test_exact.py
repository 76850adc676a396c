"""Greedy tokens equal transformers' own generate, in any batch and with any cache."""

import pytest

from mmdeploy_llm import SamplingParams
from tests.together import begin_together

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
TEXTS = ("The quick brown fox", "User: what is it?\n\nAssistant:")
SIZES = ((70, 50), (30, 64), (56, 56))


def cases(reference, picture):
    """Returns (prompt, images) of texts, one image, several of different sizes, two next to each
    other."""
    pictures = [picture(seed, *size) for seed, size in enumerate(SIZES)]
    marker = reference.family.marker
    return [
        *((text, ()) for text in TEXTS),
        (f"User: {marker}what is it? Assistant:", pictures[:1]),
        (f"A {marker}\nB {marker} C\n\n{marker} D", pictures),
        (f"{marker}{marker} the lazy dog", pictures[1:]),
    ]


def run(llm, found):
    prompts = [
        {"prompt": text, "multimodal_data": {"image": list(images)}} if images else text
        for text, images in found
    ]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.error_msg for output in outputs] == [None] * len(found)
    return outputs


def tokens(outputs):
    return [list(output.outputs.token_ids) for output in outputs]


def expected(reference, found):
    return [reference.generate(text, images) for text, images in found]


@pytest.mark.few_in_ci(3)
@pytest.mark.full
def test_batched(reference, make_llm, picture):
    llm, stats = make_llm(reference.folder)
    found = cases(reference, picture)
    begin_together(llm, len(found))
    outputs = run(llm, found)
    for output, case in zip(outputs, found, strict=True):
        ids = reference.inputs(*case)["input_ids"][0].tolist()
        assert list(output.prompt_token_ids) == ids
    assert tokens(outputs) == expected(reference, found)
    assert max(step.num_scheduled_requests for step in stats.steps) > 1


@pytest.mark.few_in_ci(3)
@pytest.mark.full
def test_in_chunks_with_a_prefix_hit(reference, make_llm, picture):
    llm, stats = make_llm(reference.folder, block_size=4, max_num_batched_tokens=7, max_num_seqs=3)
    found = cases(reference, picture)
    cold, warm = run(llm, found), run(llm, found)
    assert tokens(cold) == tokens(warm) == expected(reference, found)
    assert all(output.num_cached_tokens > 0 for output in warm if len(output.prompt_token_ids) > 4)
    assert max(step.num_scheduled_tokens for step in stats.steps) <= 7


@pytest.mark.full
def test_tokens_are_counted_without_pixels(one_reference, make_llm, picture):
    llm, _ = make_llm(one_reference.folder)
    for text, images in cases(one_reference, picture)[2:]:
        prompt = {"prompt": text, "multimodal_data": {"image": list(images)}}
        count = llm.count_tokens(prompt)
        (output,) = run(llm, [(text, images)])
        assert count.num_prompt_tokens == len(output.prompt_token_ids)
        assert count.num_input_image_tokens == output.num_input_image_tokens > 0


@pytest.mark.full
def test_chat(one_reference, make_llm, picture):
    llm, _ = make_llm(one_reference.folder)
    images = [picture(seed, *size) for seed, size in enumerate(SIZES[:2])]
    content = [
        {"type": "text", "text": "what is it? "},
        *({"type": "image", "image": image} for image in images),
    ]
    messages = [{"role": "user", "content": content}]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert output.error_msg is None
    prompt = f"User: what is it? {one_reference.family.marker * 2} Assistant:"
    assert tokens([output]) == expected(one_reference, [(prompt, images)])


@pytest.mark.full
def test_bf16_runs(reference_of, make_llm, picture):
    """In bf16 another order of additions may change tokens, so only check that the run works."""
    reference = reference_of("gemma3")
    llm, _ = make_llm(reference.folder, dtype="bfloat16")
    outputs = run(llm, cases(reference, picture))
    assert all(len(output.outputs.token_ids) == GREEDY.max_tokens for output in outputs)
