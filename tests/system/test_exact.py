"""Greedy tokens equal those of transformers' own model on the same weights, whatever the engine
does in between."""

import pytest
import torch

from mmdeploy_llm import SamplingParams
from tests.together import begin_together

GREEDY = SamplingParams(temperature=0, max_tokens=12)
TEXTS = [
    "The quick brown fox",
    "User: how many circles are there? Assistant:",
    "a",
    "There are two of them; a red circle and a blue square on a white background" * 2,
]
STATES = {"qwen3_5"}
SIZES = [(70, 90), (150, 60), (112, 112)]


def cases(reference, make_picture):
    """Returns (prompt, images): texts, and for models with images also one image, and several of
    different sizes."""
    found = [(text, ()) for text in TEXTS]
    if reference.has_images:
        pictures = [make_picture(seed, *size) for seed, size in enumerate(SIZES)]
        image = reference.image_text()
        found.append((f"User: Picture 1:{image}what is it? Assistant:", pictures[:1]))
        found.append((f"A {image} B {image} C {image} D", pictures))
        found.append((f"{image}{image} which is larger?", pictures[1:]))
    return found


def as_prompt(text, images):
    return {"prompt": text, "multimodal_data": {"image": list(images)}} if images else text


def run(llm, found, params=GREEDY):
    outputs = llm.generate([as_prompt(*case) for case in found], params, use_tqdm=False)
    assert [output.error_msg for output in outputs] == [None] * len(found)
    return outputs


def expected(reference, found):
    return [reference.generate(text, images) for text, images in found]


def tokens(outputs):
    return [list(output.outputs.token_ids) for output in outputs]


@pytest.mark.one_is_quick
def test_alone(reference, make_llm, make_picture):
    llm, _ = make_llm(reference.folder)
    for case in cases(reference, make_picture):
        assert tokens(run(llm, [case])) == expected(reference, [case])


@pytest.mark.one_is_quick
def test_prompt_token_ids_are_the_reference_ones(reference, make_llm, make_picture):
    llm, _ = make_llm(reference.folder)
    for text, images in cases(reference, make_picture):
        (output,) = run(llm, [(text, images)])
        ids = reference.inputs(text, images)["input_ids"][0].tolist()
        assert list(output.prompt_token_ids) == ids


@pytest.mark.one_is_quick
def test_batched(reference, make_llm, make_picture):
    llm, stats = make_llm(reference.folder)
    found = cases(reference, make_picture)
    begin_together(llm, len(found))
    assert tokens(run(llm, found)) == expected(reference, found)
    assert max(step.num_scheduled_requests for step in stats.steps) > 1


@pytest.mark.one_is_quick
def test_in_chunks_smaller_than_an_image(reference, make_llm, make_picture):
    llm, stats = make_llm(reference.folder, max_num_batched_tokens=5, max_num_seqs=3)
    found = cases(reference, make_picture)
    assert tokens(run(llm, found)) == expected(reference, found)
    assert max(step.num_scheduled_tokens for step in stats.steps) <= 5


@pytest.mark.one_is_quick
def test_with_preemption(reference, make_llm, make_picture):
    """Each text occurs four times, so that some request always waits for blocks."""
    found = cases(reference, make_picture)
    longest = max(reference.inputs(*case)["input_ids"].shape[1] for case in found)
    num_blocks = -(-(longest + GREEDY.max_tokens) // 4) + 6
    llm, stats = make_llm(
        reference.folder,
        block_size=4,
        num_gpu_blocks_override=num_blocks,
        max_num_seqs=12,
        enable_prefix_caching=False,
    )
    begin_together(llm, 12)
    assert tokens(run(llm, found * 4)) == expected(reference, found) * 4
    assert stats.steps[-1].num_preemptions > 0


@pytest.mark.one_is_quick
def test_with_a_prefix_cache_hit(reference, make_llm, make_picture):
    llm, _ = make_llm(reference.folder, block_size=4)
    found = cases(reference, make_picture)
    cold, warm = run(llm, found), run(llm, found)
    assert tokens(cold) == tokens(warm) == expected(reference, found)
    assert all(output.num_cached_tokens > 0 for output in warm if len(output.prompt_token_ids) > 4)


@pytest.mark.one_is_quick
def test_another_image_is_no_prefix_hit(vl_reference, make_llm, make_picture):
    """Placeholder ids are the same for all images of one size; only the content of the image
    differs."""
    llm, _ = make_llm(vl_reference.folder, block_size=4)
    text = f"User: {vl_reference.image_text()} what is it? Assistant:"
    for seed in range(3):
        case = (text, [make_picture(seed, 112, 112)])
        assert tokens(run(llm, [case])) == expected(vl_reference, [case])


@pytest.mark.one_is_quick
def test_without_prefix_cache_and_chunks(reference, make_llm, make_picture):
    llm, _ = make_llm(
        reference.folder, enable_prefix_caching=False, enable_chunked_prefill=False, max_num_seqs=2
    )
    found = cases(reference, make_picture)
    assert tokens(run(llm, found)) == expected(reference, found)


@pytest.mark.one_is_quick
def test_small_encoder_cache(vl_reference, make_llm, make_picture):
    """The embeddings of only one image fit at once."""
    most = max(w * h for w, h in SIZES) // (28 * 28) + 8
    llm, _ = make_llm(
        vl_reference.folder, encoder_cache_memory=4 * vl_reference.media_size * most, max_num_seqs=3
    )
    found = cases(vl_reference, make_picture)
    assert tokens(run(llm, found)) == expected(vl_reference, found)


@pytest.mark.one_is_quick
def test_logprobs_of_the_prompt(reference, make_llm, make_picture):
    """Every log-probability of every prompt position is within 2e-4; where layers keep states,
    which add up over the whole prompt, within 5e-4."""
    atol = 5e-4 if reference.family in STATES else 2e-4
    llm, _ = make_llm(reference.folder, max_logprobs=-1, max_num_batched_tokens=40)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
    for text, images in cases(reference, make_picture):
        (output,) = run(llm, [(text, images)], params)
        want = reference.logprobs(text, images)
        assert output.prompt_logprobs[0] is None
        for entry, row in zip(output.prompt_logprobs[1:], want, strict=False):
            got = torch.tensor([entry[token].logprob for token in range(len(row))])
            torch.testing.assert_close(got, row, atol=atol, rtol=0)
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_bf16_runs(reference, make_llm, make_picture, dtype):
    """In bf16 another order of additions may change tokens, so only the run itself is checked."""
    llm, _ = make_llm(reference.folder, dtype=dtype)
    outputs = run(llm, cases(reference, make_picture))
    assert all(output.outputs.finish_reason in ("stop", "length") for output in outputs)
