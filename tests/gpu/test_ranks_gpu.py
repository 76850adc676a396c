"""A model on two cards, over NCCL: the tokens of the CPU, decode steps from CUDA graphs that
contain the exchanges, overlapped steps, and the end of a run that loses a rank."""

import os
import signal

import pytest
import torch

from mmdeploy_llm import SamplingParams

pytestmark = pytest.mark.multi_gpu
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture
def cards(device):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    return device


def tokens(llm, prompts):
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.error_msg for output in outputs if not output.is_ok] == []
    return [output.outputs.token_ids for output in outputs]


@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "qwen2_5_vl"])
def test_the_same_tokens(family, is_eager, cards, make_llm, prompts_of):
    prompts = prompts_of(family)
    options = {"kv_cache_memory": None} if cards == "cuda" else {}  # what is measured is agreed on
    two = make_llm(family, cards, tensor_parallel_size=2, enforce_eager=is_eager, **options)
    assert two._desk.engine._runner.can_overlap == (cards == "cuda")
    assert tokens(two, prompts) == tokens(make_llm(family, "cpu"), prompts)


def test_a_lost_rank_ends_the_run(cards, make_llm, prompts_of):
    llm = make_llm("qwen2", cards, tensor_parallel_size=2)
    tokens(llm, prompts_of("qwen2"))
    os.kill(llm._desk.engine._runner._workers[1].pid, signal.SIGKILL)
    (output,) = llm.generate("more", GREEDY, use_tqdm=False)
    assert "died with signal SIGKILL" in output.error_msg
    workers = llm._desk.engine._runner._workers
    llm.close()
    assert not any(worker._process.returncode == -signal.SIGKILL for worker in workers[:1])
