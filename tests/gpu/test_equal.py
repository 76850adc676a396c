"""The card and the CPU's plain torch path give the same tokens, for every family and backend."""

import numpy as np
import pytest
from mmdeploy_llm_plugins.attention import provide_attention_backends

from mmdeploy_llm import SamplingParams
from mmdeploy_llm.testing.tiny import generating

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SCORED = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
BACKENDS = (
    "reference",
    *(spec.name for spec in provide_attention_backends() if spec.devices == ("cuda",)),
)
EACH_BACKEND = ("qwen2", "ernie4_5_vl_moe")
TOLERANCE = 0.25  # of log-probabilities in bfloat16


def tokens(llm, prompts, params=GREEDY):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.error_msg for output in outputs if not output.is_ok] == []
    return [output.outputs.token_ids for output in outputs]


def prompt_scores(llm, prompts):
    """Returns the log-probability of each prompt token but the first."""
    outputs = llm.generate(prompts, SCORED, use_tqdm=False)
    assert [output.error_msg for output in outputs if not output.is_ok] == []
    return [
        [next(iter(entry.values())).logprob for entry in output.prompt_logprobs if entry]
        for output in outputs
    ]


@pytest.fixture(scope="module")
def known():
    """Computes once what does not depend on the backend."""
    return {}


@pytest.mark.parametrize("family", sorted(generating()))
def test_tokens_of_every_family(family, device, make_llm, prompts_of):
    prompts = prompts_of(family)
    expected = tokens(make_llm(family, "cpu"), prompts)
    assert tokens(make_llm(family, device), prompts) == expected


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", EACH_BACKEND)
def test_scores_of_every_backend_in_bfloat16(family, backend, device, make_llm, prompts_of, known):
    """The longest prompts have two chunks, so that a chunk attends to keys in the cache."""
    prompts = [prompt for prompt in prompts_of(family) if isinstance(prompt, list)]
    if ("scores", family) not in known:
        known["scores", family] = prompt_scores(make_llm(family, "cpu"), prompts)
    expected = known["scores", family]
    options = {"dtype": "bfloat16", "attention_backend": backend, "max_num_batched_tokens": 48}
    found = prompt_scores(make_llm(family, device, **options), prompts)
    ours, theirs = (np.concatenate([*map(np.array, each)]) for each in (found, expected))
    apart = np.abs(ours - theirs)  # a router near a tie may send a token to other experts
    assert np.median(apart) < 0.1
    assert np.mean(apart) < TOLERANCE


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", EACH_BACKEND)
def test_decoding_of_every_backend_in_bfloat16(
    family, backend, device, make_llm, prompts_of, known
):
    """Each backend against the reference on the same device: the tokens are equal until two
    candidates have nearly equal log-probabilities."""
    prompts = prompts_of(family)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)

    def outputs(name):
        llm = make_llm(family, device, dtype="bfloat16", attention_backend=name)
        return llm.generate(prompts, params, use_tqdm=False)

    if ("decoded", family) not in known:
        known["decoded", family] = outputs("reference")
    for expected, found in zip(known["decoded", family], outputs(backend), strict=True):
        assert found.is_ok, found.error_msg
        assert_same_until_a_tie(expected.outputs, found.outputs)


def assert_same_until_a_tie(expected, found):
    for place, (wanted, got) in enumerate(zip(expected.token_ids, found.token_ids, strict=True)):
        if wanted != got:
            first, second, *_ = sorted(
                (entry.logprob for entry in expected.logprobs[place].values()), reverse=True
            )
            assert first - second < TOLERANCE, f"token {place} is {got}, not {wanted}"
            return


def test_graphs_give_the_tokens_of_eager_steps(device, on_card, make_llm, prompts_of, caplog):
    caplog.set_level("INFO")
    for family in EACH_BACKEND:
        prompts = prompts_of(family)
        eager = tokens(make_llm(family, device, enforce_eager=True), prompts)
        caplog.clear()
        graphs = tokens(make_llm(family, device), prompts)
        assert "CUDA graphs for decode steps, recorded in" in caplog.text, caplog.text
        assert graphs == eager


def test_seeded_tokens_do_not_depend_on_the_device(device, make_llm, prompts_of):
    params = [
        SamplingParams(temperature=0.8, seed=seed, max_tokens=10, ignore_eos=True, **options)
        for seed, options in enumerate(
            ({}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.2})
        )
    ]
    prompts = prompts_of("qwen2")
    expected = tokens(make_llm("qwen2", "cpu"), prompts, params)
    assert tokens(make_llm("qwen2", device), prompts, params) == expected


def test_images_encoded_together_are_those_encoded_alone(device, make_llm, prompts_of):
    prompts = [prompt for prompt in prompts_of("qwen2_5_vl") if isinstance(prompt, dict)]
    llm = make_llm("qwen2_5_vl", device)
    assert tokens(llm, prompts) == [tokens(llm, [prompt])[0] for prompt in prompts]


def test_prefix_hits_give_the_same_tokens(device, make_llm, prompts_of):
    prompts = [list(range(60, 60 + 200)) + tail for tail in ([1, 2], [3], [4, 5, 6])]
    expected = tokens(make_llm("qwen2", "cpu"), prompts)
    llm = make_llm("qwen2", device, enable_prefix_caching=True)
    assert tokens(llm, prompts) == expected
    assert tokens(llm, prompts) == expected
