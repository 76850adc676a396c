"""A model with states through LLM: what its prefix cache reuses, what it records, and what it
refuses."""

from itertools import count

import pytest
import torch

from mmdeploy_llm import LLM, ConfigError, SamplingParams
from mmdeploy_llm.engine.runner.states import Places
from mmdeploy_llm.engine.schedule.lifecycle import Lifecycle
from mmdeploy_llm.engine.schedule.pace import Pace
from mmdeploy_llm.kernels.cpu import CpuKernels
from mmdeploy_llm.layers import GatedDeltaNet, Mamba2
from mmdeploy_llm.layers.basic import recordings
from tests.together import begin_together

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


@pytest.mark.full
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


WAYS = {
    "drafts": {"speculative": "ngram"},
    "preemptions and prefixes": {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 24},
    "a step that fails": {},
}
LAYERS = {
    "qwen3_5_text": (GatedDeltaNet, {"linear_value_head_dim": 16}),
    "nemotron_h": (Mamba2, {}),
}


@pytest.mark.full
@pytest.mark.parametrize("family", LAYERS)
@pytest.mark.parametrize("way", WAYS)
def test_matrices_that_change_in_place(tiny_folder, monkeypatch, kernels, way, family):
    """Every token and logprob is that of matrices that each step writes anew, also after steps that
    failed when some layers had changed theirs."""
    assert isinstance(kernels, CpuKernels)
    if not kernels.has_wide_registers:
        return  # products of torch, with bits that depend on the number of rows
    layer, sizes = LAYERS[family]
    folder = str(tiny_folder(family, **sizes))
    shared = [30 + i % 11 for i in range(21)]
    prompts = [[*shared, *[40 + i] * i] for i in range(6)] * 2
    params = [
        SamplingParams(temperature=0, max_tokens=9 + 3 * i, ignore_eos=True, logprobs=1)
        for i in range(len(prompts))
    ]
    options = {"dtype": "bfloat16", "enable_logprob": True, "max_num_seqs": 4, "block_size": 4}
    real, calls, failed, in_place, preempted = layer.forward, count(), [], [], []
    real_preempt = Lifecycle.preempt

    def preempt(self, state):
        preempted.append(state)
        real_preempt(self, state)

    def forward(self, x, states):
        out = real(self, x, states)
        in_place.append(torch.equal(states.source, states.target))
        # A sequence whose step fails while it is alone ends with an error; the others go on.
        if way == "a step that fails" and len(states.source) > 1 and next(calls) % 7 == 6:
            failed.append(in_place[-1])
            raise RuntimeError("in the middle of a step")
        return out

    def run():
        with LLM(folder, **options, **WAYS[way]) as llm:
            begin_together(llm, 4)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return [(out.outputs.token_ids, out.outputs.logprobs) for out in outputs], llm.stats()

    monkeypatch.setattr(recordings, "MAX_RECORDED_ROWS", 0)
    monkeypatch.setattr(Pace, "best_length", lambda self, num_requests, guesses: 4)
    monkeypatch.setattr(layer, "forward", forward)
    monkeypatch.setattr(Lifecycle, "preempt", preempt)
    found, stats = run()
    assert any(in_place)
    assert any(failed) == (way == "a step that fails")
    in_place.clear()
    monkeypatch.setattr(Places, "move", lambda self, read, write, num_tokens: (read, write))
    assert run()[0] == found
    assert not any(in_place)
    if way == "drafts":
        assert stats.num_drafts > 0
    elif way == "preemptions and prefixes":
        assert preempted
        assert stats.num_cached_tokens > 0
