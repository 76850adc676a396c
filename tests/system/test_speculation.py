"""speculative="ngram": the answers of a run without it, and drafts that are right."""

import pytest

from mmdeploy_llm import LLM, GuidedDecodingParams, SamplingParams
from mmdeploy_llm.engine.schedule.pace import Pace

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


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name != "float32")) for name in FORMATS]
)
def test_answers_are_those_without_drafts(tiny_folder, name, monkeypatch):
    monkeypatch.setattr(Pace, "best_length", lambda self, num_requests, guesses: 7)
    folder, options = tiny_folder("qwen2"), FORMATS[name]
    plain, _ = answers(folder, **options)
    drafted, stats = answers(folder, speculative="ngram", **options)
    assert drafted == plain
    assert 50 < stats.num_accepted_drafts <= stats.num_drafts


OTHERS = {
    "several completions": SamplingParams(temperature=0.4, seed=2, n=2, max_tokens=40),
    "stop tokens in drafts": SamplingParams(
        temperature=0, max_tokens=60, min_tokens=30, stop_token_ids=list(range(60, 300, 2))
    ),
    "prompt_logprobs": SamplingParams(
        temperature=0, max_tokens=30, prompt_logprobs=2, logprobs=3, ignore_eos=True
    ),
    "logits processors": SamplingParams(
        temperature=0,
        max_tokens=40,
        ignore_eos=True,
        logits_processors_args={"logit_bias": {7: 2.0}, "repetition_window": 5},
    ),
    "penalties": SamplingParams(
        temperature=0, max_tokens=40, frequency_penalty=0.2, no_repeat_ngram_size=6
    ),
}


def completions_of(outputs):
    """Returns what each completion says, and the log-probabilities of the prompts."""
    assert [one.error_msg for one in outputs] == [None] * len(outputs)
    return [
        (
            [
                (each.token_ids, each.text, each.reasoning_content, each.finish_reason)
                for each in one.outputs
            ],
            [each.logprobs for each in one.outputs],
            one.prompt_logprobs,
        )
        for one in outputs
    ]


@pytest.fixture
def always_drafts(monkeypatch):
    monkeypatch.setattr(Pace, "best_length", lambda self, num_requests, guesses: 7)


@pytest.mark.full
@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"kv_cache_dtype": "int8"}, marks=pytest.mark.full),
        pytest.param({"kv_cache_dtype": "int4"}, marks=pytest.mark.full),
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_options_of_requests_with_drafts(tiny_folder, options):
    found = []
    for speculative in (None, "ngram"):
        with LLM(
            str(tiny_folder("qwen2")),
            dtype="float32",
            max_model_len=512,
            quiet=True,
            use_warmup=False,
            logits_processors=["logit_bias", "repetition_window"],
            enable_logprob=True,
            speculative=speculative,
            **options,
        ) as llm:
            found.append(
                completions_of(
                    llm.generate([TABLE] * len(OTHERS), [*OTHERS.values()], use_tqdm=False)
                )
            )
            stats = llm.stats()
    for name, plain, drafted in zip(OTHERS, *found, strict=True):
        assert drafted == plain, name
    assert 20 < stats.num_accepted_drafts < stats.num_drafts


@pytest.mark.full
@pytest.mark.usefixtures("always_drafts")
def test_thinking_budgets_with_drafts(tiny_folder):
    params = [
        SamplingParams(temperature=0, max_tokens=50, reasoning_max_tokens=own, ignore_eos=True)
        for own in (4, 9, 30)
    ]
    messages = [[{"role": "user", "content": "fox jumps " * 8}]] * len(params)
    found = []
    for speculative in (None, "ngram"):
        with LLM(
            str(tiny_folder("ernie4_5_vl_moe")),
            dtype="float32",
            max_model_len=512,
            quiet=True,
            use_warmup=False,
            reasoning_parser="ernie_45_vl",
            speculative=speculative,
        ) as llm:
            found.append(completions_of(llm.chat(messages, params, use_tqdm=False)))
            stats = llm.stats()
    assert found[0] == found[1]
    assert stats.num_accepted_drafts > 5


@pytest.mark.full
@pytest.mark.usefixtures("always_drafts")
def test_a_stream_that_is_left_with_drafts(tiny_folder):
    """A request that is cancelled after drafts were tried leaves its blocks to the others, and
    these have the same tokens."""
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with LLM(
        str(tiny_folder("qwen2")), dtype="float32", max_model_len=512, speculative="ngram"
    ) as llm:
        [whole] = llm.generate([TABLE], params, use_tqdm=False)
        stream = llm.stream(TABLE, params)
        taken = [next(stream) for _ in range(5)]
        stream.close()
        [again] = llm.generate([TABLE], params, use_tqdm=False)
        stats = llm.stats()
    begin = [token_id for one in taken for token_id in one.outputs.token_ids]
    assert begin == list(whole.outputs.token_ids)[: len(begin)]
    assert again.outputs.token_ids == whole.outputs.token_ids
    assert stats.num_accepted_drafts > 20
