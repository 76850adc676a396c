"""Text families in the engine: greedy tokens equal transformers' own model, with windows, experts
and norms in play while blocks are small, prompts come in chunks and prefixes are hit."""

import pytest

from mmdeploy_llm import SamplingParams

FAMILIES = ("glm", "glm4", "llama", "mistral", "qwen2_moe", "qwen3", "qwen3_moe")
TEXTS = [
    "The quick brown fox",
    "User: how many circles are there? Assistant:",
    "a",
    "There are two of them; a red circle and a blue square on a white background" * 2,
]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_the_reference(family, reference_of, make_llm):
    reference = reference_of(family)
    expected = [reference.generate(text, max_tokens=16) for text in TEXTS]
    llm, stats = make_llm(
        reference.folder,
        block_size=4,
        max_num_batched_tokens=7,
        max_num_seqs=3,
        num_gpu_blocks_override=160,
    )
    params = SamplingParams(temperature=0, max_tokens=16)
    for is_warm in (False, True):
        outputs = llm.generate(TEXTS, params, use_tqdm=False)
        assert [output.error_msg for output in outputs] == [None] * len(TEXTS)
        assert [list(output.outputs.token_ids) for output in outputs] == expected
        assert (outputs[-1].num_cached_tokens > 0) is is_warm
    assert max(step.num_scheduled_requests for step in stats.steps) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_chat_templates_are_those_of_the_tokenizer(family, reference_of, make_llm):
    reference = reference_of(family)
    llm, _ = make_llm(reference.folder)
    messages = [{"role": "user", "content": "how many circles are there?"}]
    params = SamplingParams(temperature=0, max_tokens=8)
    (output,) = llm.chat(messages, params, use_tqdm=False)
    prompt = reference.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert list(output.prompt_token_ids) == list(prompt)
    text = reference.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    assert list(output.outputs.token_ids) == reference.generate(text, max_tokens=8)
