"""A model with states through LLM: what its prefix cache reuses, what it records, and what it
refuses."""

import pytest

from mmdeploy_llm import LLM, ConfigError, SamplingParams
from mmdeploy_llm.basic_layers import recordings
from mmdeploy_llm.native import CpuKernels

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def captions(make_picture, count):
    """Prompts with one system prompt and an image each."""
    system = "You describe pictures in one sentence. " * 8
    return [
        {
            "prompt": f"{system}{IMAGE} Describe it.",
            "multimodal_data": {"image": [make_picture(seed, 60, 80)]},
        }
        for seed in range(count)
    ]


def test_captions_reuse_the_system_prompt(tiny_folder, make_picture):
    prompts = captions(make_picture, 8)
    folder = str(tiny_folder("qwen3_5"))
    with LLM(folder, block_size=16, enable_prefix_caching=False) as llm:
        want = [output.outputs.token_ids for output in llm.generate(prompts, PARAMS)]
    with LLM(folder, block_size=16) as llm:
        first, *others = [llm.generate(prompt, PARAMS)[0] for prompt in prompts]
        # The same text at once: tokens do not depend on who computed the state.
        again = llm.generate(prompts, PARAMS)
    assert first.num_cached_tokens == 0
    cached = {output.num_cached_tokens for output in others}
    assert len(cached) == 1
    (count,) = cached
    assert count >= 64
    assert count % 16 == 0
    assert [output.outputs.token_ids for output in (first, *others)] == want
    assert [output.outputs.token_ids for output in again] == want
    assert all(output.num_cached_tokens >= count for output in again)


def test_too_many_sequences_for_the_memory_of_states(tiny_folder):
    with pytest.raises(ConfigError, match=r"lower max_num_seqs to \d+ or less"):
        LLM(str(tiny_folder("qwen3_5")), kv_cache_memory=2**20, max_num_seqs=512)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode_steps_are_recorded(tiny_folder, make_picture, monkeypatch, kernels, dtype):
    """Sequences come and go, so that numbers of sequences and rows of states change; every token
    and logprob is that of steps that are computed layer by layer."""
    assert isinstance(kernels, CpuKernels)
    folder = str(tiny_folder("qwen3_5", linear_value_head_dim=16))
    prompts = [[30 + 7 * i, 40, 41 + i] * (i + 1) for i in range(5)] + captions(make_picture, 2)
    lengths = (5, 9, 14, 3, 20, 6, 8)
    params = [
        SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, logprobs=1)
        for length in lengths
    ]

    def run():
        with LLM(folder, dtype=dtype, enable_logprob=True, max_num_seqs=4) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            recorded = list(llm.model.model._recordings.values())
        return [(out.outputs.token_ids, out.outputs.logprobs) for out in outputs], recorded

    found, recorded = run()
    # At the portable level torch multiplies float32, with bits that depend on the number of rows.
    is_ours = dtype == "bfloat16" or kernels.has_wide_registers
    assert {recording is not None for recording in recorded} == {is_ours}
    if not is_ours:
        return
    monkeypatch.setattr(recordings, "MAX_RECORDED_ROWS", 0)
    expected, recorded = run()
    assert not recorded
    assert found == expected
