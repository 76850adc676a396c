"""Sequences that get one token each share a pass of transformers' decoder where a trial shows that
it changes nothing: answers are those of a pass for each, and of transformers."""

import pytest
import torch
from mmdeploy_llm_plugins.transformers_any.by_sequence import BySequence
from mmdeploy_llm_plugins.transformers_any.mechanisms import ALONE, SHARED

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.testing.checkpoint import write_checkpoint
from mmdeploy_llm.testing.tiny import make_tokenizer

PROMPTS = [[45, 59, 33, 47, 71], [301, 52, 105, 77] * 5 + [48, 60, 61], list(range(40, 71)), [44]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SETTINGS = {
    "dtype": "float32",
    "num_threads": 1,
    "use_warmup": False,
    "block_size": 4,
    "kv_cache_memory": 2**26,
    "max_model_len": 64,
    "blocked_plugins": ("decoders", "granite", "nemotron", "qwen"),
}
# Biases by distance, windows, states with attention and without, keys of another layer, mixers of
# Mamba-2 that are the engine's.
CLASSES = (
    "BambaForCausalLM",
    "BloomForCausalLM",
    "FalconH1ForCausalLM",
    "GPTNeoForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "Mamba2ForCausalLM",
    "MambaForCausalLM",
    "NemotronHForCausalLM",
    "Qwen3NextForCausalLM",
    "Zamba2ForCausalLM",
)


@pytest.fixture(scope="module")
def census(load_file):
    return load_file("plugins/transformers_any/census/census.py")


@pytest.fixture(scope="module", params=CLASSES)
def folder(request, census, tmp_path_factory):
    made = tmp_path_factory.mktemp(request.param)
    config = census.config_of(request.param)
    write_checkpoint(config, made, tokenizer=make_tokenizer("qwen2"), dtype=torch.float32)
    return request.param, made


def answers(llm):
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.error_msg for output in outputs] == [None] * len(PROMPTS)
    return [list(output.outputs.token_ids) for output in outputs]


@pytest.mark.few_in_ci(4)
@pytest.mark.full
def test_answers_are_those_of_a_pass_for_each(folder, census, monkeypatch):
    """They are so in one batch, in steps that hold prompts too, and in a pool where requests are
    preempted."""
    name, made = folder
    counts = []
    plain = BySequence._shared_pass

    def counted(self, attn, numbers, *inputs):
        counts.append(len(numbers))
        return plain(self, attn, numbers, *inputs)

    inputs = [{"input_ids": torch.tensor([prompt])} for prompt in PROMPTS]
    monkeypatch.setattr(census, "MAX_TOKENS", GREEDY.max_tokens)
    wanted = [tokens for tokens, _ in census.reference(made, name, inputs)]
    monkeypatch.setattr(BySequence, "_shared_pass", counted)
    for more in (
        {},
        {"max_num_batched_tokens": 7, "max_num_seqs": 4},
        {"num_gpu_blocks_override": 17},
    ):
        counts.clear()
        with LLM(model=str(made), **SETTINGS, **more) as llm:
            assert SHARED in llm.model.mechanisms
            assert answers(llm) == wanted
        assert max(counts) > 2
    with LLM(model=str(made), **SETTINGS) as llm:
        llm.model._way._alone = "to compare"
        counts.clear()
        assert answers(llm) == wanted
        assert not any(counts)


@pytest.mark.full
def test_a_model_that_counts_entries_shares_nothing(census, tmp_path):
    """An indexer's keys stand for positions that padding would shift."""
    config = census.config_of("DeepseekV32ForCausalLM")
    write_checkpoint(config, tmp_path, tokenizer=make_tokenizer("qwen2"), dtype=torch.float32)
    with LLM(model=str(tmp_path), **SETTINGS) as llm:
        assert "chosen keys" in llm.model.mechanisms
        assert SHARED not in llm.model.mechanisms


@pytest.mark.full
def test_why_passes_are_not_shared_is_said(census, tmp_path, monkeypatch, caplog):
    """An error of transformers' code in the trial of a shared pass is in the log."""
    config = census.config_of("BloomForCausalLM")
    write_checkpoint(config, tmp_path, tokenizer=make_tokenizer("qwen2"), dtype=torch.float32)

    def fails(*_):
        raise RuntimeError("no two sequences")

    monkeypatch.setattr(BySequence, "_shared_pass", fails)
    with LLM(model=str(tmp_path), **SETTINGS) as llm:
        assert llm.model.mechanisms[:2] == ("by sequence", ALONE)
    assert "a trial failed (RuntimeError: no two sequences)" in caplog.text
