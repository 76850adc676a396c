"""speculative="ngram": the answers of a run without it, and drafts that are right."""

import pytest

from mmdeploy_llm import LLM, GuidedDecodingParams, SamplingParams
from mmdeploy_llm.schedule.pace import Pace

TABLE = [5, 6, 7, 8, 9] * 40
PROMPTS = [TABLE, list(range(20, 60)) * 2, [30, 31, 32, 33], TABLE[:65], [40] * 30]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=0.3, seed=3, max_tokens=50, logprobs=2, repetition_penalty=1.1),
    SamplingParams(temperature=0, max_tokens=64, min_tokens=40, logprobs=1),
    SamplingParams(temperature=0, max_tokens=48, stop=["e", "a b"], ignore_eos=True),
    SamplingParams(
        temperature=0.5,
        seed=5,
        max_tokens=40,
        guided_decoding=GuidedDecodingParams(regex="(ab|c)*"),
    ),
]
FORMATS = {
    "float32": {"dtype": "float32"},
    "deterministic": {"dtype": "bfloat16", "deterministic": True},
    "few blocks": {"dtype": "float32", "num_gpu_blocks_override": 20, "block_size": 16},
    "small chunks": {"dtype": "float32", "max_num_batched_tokens": 40},
}


def answers(folder, **options):
    with LLM(str(folder), max_model_len=512, quiet=True, use_warmup=False, **options) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        stats = llm.stats()
    found = [
        (one.outputs.token_ids, one.outputs.text, one.outputs.finish_reason, one.outputs.logprobs)
        for one in outputs
    ]
    assert [one.error_msg for one in outputs] == [None] * len(outputs)
    return found, stats


@pytest.mark.parametrize("name", FORMATS)
def test_answers_are_those_without_drafts(tiny_folder, name, monkeypatch):
    monkeypatch.setattr(Pace, "best_length", lambda self, num_requests, guesses: 7)
    folder, options = tiny_folder("qwen2"), FORMATS[name]
    plain, _ = answers(folder, **options)
    drafted, stats = answers(folder, speculative="ngram", **options)
    assert drafted == plain
    assert 50 < stats.num_accepted_drafts <= stats.num_drafts
