"""Memory of a card of limited size: what the KV cache gets, and steps that run out of memory."""

import gc

import pytest

from mmdeploy_llm import LLM, ConfigError, SamplingParams
from mmdeploy_llm.hooks import hookimpl
from tests.together import begin_together

OPTIONS = {
    "device": "cuda",
    "max_num_seqs": 3,
    "max_model_len": 2048,
    "block_size": 16,
    "max_num_batched_tokens": 64,
    "enforce_eager": True,
    "native_kernels": False,  # plain torch: seconds instead of minutes in the interpreter
    "attention_backend": "reference",
}
TOTAL = 2**22
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(folder_of):
    return folder_of("ernie4_5", head_dim=16)


def tokens(llm, prompts, params=GREEDY):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(output.error_code == 200 for output in outputs), [o.error_msg for o in outputs]
    return [output.outputs.token_ids for output in outputs]


@pytest.mark.full
def test_the_kv_cache_takes_what_the_largest_steps_leave(folder, new_card):
    """The KV cache fills nearly all of our share, and the largest steps then have enough memory."""
    card = new_card(total=TOTAL, others=2**19)
    with LLM(model=folder, gpu_memory_utilization=0.9, **OPTIONS) as llm:
        usable = 0.9 * TOTAL - 2**19
        assert 0.8 * usable < card.allocated < usable
        card.empty_cache()
        card.reset_peaks()
        tokens(llm, [[66] * 64, [67] * 64, [68] * 64])
        # What the sampler keeps of each slot is not counted, but for penalties: kilobytes.
        assert card.allocated < card.most_reserved <= 1.02 * usable


@pytest.mark.full
def test_the_counts_of_penalties_find_memory_beside_the_kv_cache(folder_of, new_card):
    """The counts are allocated with the first request that needs them, after the KV cache has its
    share."""
    few = {"num_hidden_layers": 1, "vocab_size": 16384}
    folder = folder_of("ernie4_5", head_dim=16, **few)
    total = 10 * 2**20
    card = new_card(total=total)
    options = {**OPTIONS, "native_kernels": None, "use_warmup": False}
    options |= {"max_num_seqs": 16, "max_num_batched_tokens": 16}
    with LLM(model=folder, gpu_memory_utilization=0.9, **options) as llm:
        card.empty_cache()
        card.reset_peaks()
        before = card.allocated
        params = SamplingParams(max_tokens=1, temperature=0.5, frequency_penalty=1.0)
        outputs = llm.generate([[66]] * 16, params, use_tqdm=False)
    assert {output.error_code for output in outputs} == {200}
    # What the sampler keeps of each slot is not counted, but for penalties: kilobytes.
    assert card.most_reserved <= 0.9 * total + 2**14
    assert card.most_reserved - before > 16 * 16384 * 2


@pytest.mark.full
def test_a_closed_model_leaves_its_memory_to_the_next(folder, new_card):
    """Nobody collects garbage between them, and the card has no room for two."""
    card = new_card(total=TOTAL)
    gc.disable()
    try:
        for _ in range(2):
            with LLM(model=folder, gpu_memory_utilization=0.9, **OPTIONS) as llm:
                (first,) = tokens(llm, [[66] * 64])
                assert card.allocated > 0.7 * TOTAL
            assert card.reserved < 0.05 * TOTAL
            assert len(first) == 5
    finally:
        gc.enable()


def test_a_card_that_is_too_small_raises_with_the_numbers(folder, new_card):
    new_card(total=TOTAL, others=TOTAL - 2**18)
    with pytest.raises(ConfigError, match=r"has 0\.00 GiB"):
        LLM(model=folder, gpu_memory_utilization=0.9, **OPTIONS)


@pytest.mark.full
def test_a_pass_without_memory_is_retried_in_smaller_ones(folder, new_card, caplog):
    card = new_card()
    prompts = [[66] * 60]
    with LLM(
        model=folder, num_gpu_blocks_override=32, enable_prefix_caching=False, **OPTIONS
    ) as llm:
        card.empty_cache()
        card.reset_peaks()
        expected = tokens(llm, prompts)
        peak = card.most_reserved - card.allocated
        card.others = card.total - card.allocated - int(0.7 * peak)
        assert tokens(llm, prompts) == expected
    assert "passes have at most 30 tokens now" in caplog.text


@pytest.mark.full
def test_preempted_requests_continue_with_the_same_tokens(folder, new_card):
    """Each request grows to three of the four blocks, the third one 18 steps after its start."""
    new_card()
    prompts = [[66] * 14, [67] * 15, [68] * 16]  # two blocks each, of three
    params = GREEDY.model_copy(update={"max_tokens": 22})
    with LLM(model=folder, num_gpu_blocks_override=32, **OPTIONS) as llm:
        expected = tokens(llm, prompts, params)
    few = {**OPTIONS, "max_model_len": 48}
    with LLM(model=folder, num_gpu_blocks_override=3, **few) as llm:
        steps = []
        llm.plugins.register(Steps(steps), name="steps")
        begin_together(llm, len(prompts))
        assert tokens(llm, prompts, params) == expected
    assert steps[-1].num_preemptions > 0


class Steps:
    """Observes the engine's steps."""

    def __init__(self, steps):
        self.steps = steps

    @hookimpl
    def on_step(self, stats):
        self.steps.append(stats)
