"""Models whose layers have windows, through LLM: exact, in pools that hold little more than the
windows."""

import pytest

from mmdeploy_llm import LLM, SamplingParams

LENGTH = 70
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
PROMPTS = [list(range(30, 30 + length)) for length in (40, 3, 75, 40, 1, 60)]
OPTIONS = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 256,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 4,
    "block_size": 16,
    "use_warmup": False,
    "quiet": True,
}
FAMILIES = {"mistral": {"sliding_window": 24}, "gemma3_text": {"sliding_window": 20}}


@pytest.fixture(
    scope="module", params=["mistral", pytest.param("gemma3_text", marks=pytest.mark.full)]
)
def folder(request, tiny_folder):
    return tiny_folder(request.param, **FAMILIES[request.param])


@pytest.fixture(scope="module")
def expected(folder, transformers_of):
    reference = transformers_of(folder)
    return [reference.generate(prompt, LENGTH) for prompt in PROMPTS]


@pytest.mark.few_in_ci(3)
@pytest.mark.parametrize("backend", ["native", pytest.param("reference", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"enable_prefix_caching": False}, marks=pytest.mark.full),
        pytest.param({"num_threads": 1}, marks=pytest.mark.long),
    ],
)
def test_tokens_equal_transformers(folder, expected, backend, changes):
    with LLM(str(folder), attention_backend=backend, **OPTIONS, **changes) as llm:
        windows = llm._desk.engine._scheduler._requests.windows
        for _ in range(2):  # the second time from the prefix cache
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            assert [one.error_msg for one in outputs] == [None] * len(PROMPTS)
            assert [one.outputs.token_ids for one in outputs] == expected
        assert windows.pool.num_free == windows.pool.num_blocks
        # Four windows, a step and one sequence of prefixes, not four sequences.
        assert windows.pool.num_blocks <= 4 * 4 + 2 + 16


@pytest.mark.full
def test_speculation_drafts_are_given_back(folder, expected):
    with LLM(str(folder), speculative="ngram", **OPTIONS) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [one.outputs.token_ids for one in outputs] == expected


@pytest.mark.full
@pytest.mark.parametrize(
    ("backend", "kv_cache_dtype"),
    [
        ("native", "int8"),
        ("native", "int4"),
        pytest.param("reference", "int4", marks=pytest.mark.long),
    ],
)
def test_few_bits(folder, expected, backend, kv_cache_dtype):
    """Keys and values in 8 and 4 bits: tokens in chunks, in batches and from the prefix cache are
    those of a sequence alone, and in 8 bits begin as transformers' do."""
    own = {"attention_backend": backend, "kv_cache_dtype": kv_cache_dtype}
    alone = {"max_num_batched_tokens": 256, "max_num_seqs": 1, "enable_prefix_caching": False}
    with LLM(str(folder), **OPTIONS | own | alone) as llm:
        wanted = [one.outputs.token_ids for one in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    with LLM(str(folder), **OPTIONS | own) as llm:
        windows = llm._desk.engine._scheduler._requests.windows
        for _ in range(2):
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            assert [one.error_msg for one in outputs] == [None] * len(PROMPTS)
            assert [one.outputs.token_ids for one in outputs] == wanted
        assert windows.pool.num_free == windows.pool.num_blocks
    if kv_cache_dtype == "int8":
        assert [ids[0] for ids in wanted] == [ids[0] for ids in expected]
