"""CudaSampler, compared with Sampler, and the work that it does without waiting."""

import random

import pytest
import torch

from mmdeploy_llm.engine.runner.sampling.make import make_sampler
from mmdeploy_llm.engine.runner.sampling.results import NOT_FINITE, NOTHING_ALLOWED
from mmdeploy_llm.engine.runner.sampling.sampler import Sampler
from mmdeploy_llm.engine.runner.sampling.state import SlotRequest
from mmdeploy_llm.kernels import TORCH
from mmdeploy_llm.values.params import SamplingParams

RESOLVED = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "max_tokens": 1000,
    "seed": 1,
}
RANDOM = {"temperature": 1.2, "top_p": 0.9}


def make_request(**fields):
    own = {name: fields.pop(name) for name in SlotRequest.__dataclass_fields__ if name in fields}
    own.setdefault("prompt_token_ids", (1, 2, 3))
    return SlotRequest(params=SamplingParams(**{**RESOLVED, **fields}), **own)


@pytest.fixture
def make(triton_device):
    """Returns both samplers, with the given requests in slots 0, 1, ..."""
    from mmdeploy_llm.engine.runner.sampling.cuda_sampler import CudaSampler
    from mmdeploy_llm.kernels.cuda.choose import Tiling

    def make(requests, vocab_size=50, tiling=None, num_slots=None):
        common = {"max_num_slots": num_slots or len(requests), "vocab_size": vocab_size}
        tiling = tiling or Tiling(block=64, candidates=16, together=128)
        host = Sampler(**common, device=torch.device("cpu"))
        device = CudaSampler(**common, device=triton_device, tiling=tiling)
        for slot, request in enumerate(requests):
            host.add(slot, request)
            device.add(slot, request)
        return host, device

    return make


def random_request(rng):
    """Returns a request with random parameters, rules and trackers."""
    fields = {"temperature": rng.choice([0.0, 0.3, 1.0, 2.0]), "seed": rng.randrange(2**59)}
    token, some = lambda: rng.randrange(50), lambda: rng.random() < 0.4
    choices = {
        "top_k": [1, 3, 40, 70, 10_000],
        "top_p": [0.0, 0.2, 0.7, 0.99],
        "min_p": [0.05, 0.5, 1.0],
        "repetition_penalty": [0.8, 1.4],
        "presence_penalty": [-1.0, 0.7],
        "frequency_penalty": [-0.5, 1.5],
        "min_tokens": [1, 3],
        "logprobs": [0, 1, 4],
        "no_repeat_ngram_size": [1, 2, 0, 0, 0, 0],
        "stop_token_ids": [[token(), token()]],
        "logit_bias": [{token(): rng.uniform(-20, 20) for _ in range(rng.choice([1, 3, 30]))}],
        "eos_token_ids": [frozenset([token(), token()])],
        "bad_words_token_ids": [((token(),), (token(),)), ((token(), token()),)],
        "output_token_ids": [tuple(token() for _ in range(3))],
    }
    fields |= {name: rng.choice(values) for name, values in choices.items() if some()}
    if rng.random() < 0.1:
        fields |= {"reasoning_end_ids": (3, 4), "reasoning_max_tokens": rng.randint(1, 4)}
    fields["prompt_token_ids"] = tuple(token() for _ in range(rng.randrange(20)))
    return make_request(**fields)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("seed", range(10))
def test_equal_to_the_sampler(make, triton_device, seed):
    """Random requests, in any slots and order, over steps that some of them skip."""
    from mmdeploy_llm.kernels.cuda.choose import Tiling

    rng, vocab_size = random.Random(seed), [50, 64, 300, 701][seed % 4]
    requests = [random_request(rng) for _ in range(rng.randint(1, 6))]
    tiling = Tiling(block=128, candidates=32, together=256) if seed % 2 else None
    host, device = make(requests, vocab_size, tiling)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(4):
        slots = rng.sample(range(len(requests)), rng.randint(1, len(requests)))
        logits = torch.randn(len(slots), vocab_size, generator=generator) * 3
        logits = logits.half() if seed % 3 == 0 else logits
        before, expected = logits.clone(), host.sample(logits, slots)
        found = device.sample(logits.to(triton_device), slots)
        assert (found.token_ids, found.errors) == (expected.token_ids, expected.errors)
        if triton_device.type == "cpu":
            assert found.logprobs == expected.logprobs
        assert torch.equal(logits, before)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_failures(make, triton_device):
    """The other rows have tokens; a failed row can be sampled again from the same state."""
    everything = tuple((token,) for token in range(50))
    requests = [
        make_request(**RANDOM),
        make_request(**RANDOM, bad_words_token_ids=everything),
        make_request(frequency_penalty=1.0),
        make_request(),
        make_request(),
    ]
    host, device = make(requests)
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    logits[2, 7], logits[3], logits[4, 9] = torch.nan, -torch.inf, torch.inf
    for sampler, given in ((host, logits), (device, logits.to(triton_device))):
        result = sampler.sample(given, range(5))
        expected = {1: NOTHING_ALLOWED, 2: NOT_FINITE, 3: NOT_FINITE, 4: NOT_FINITE}
        assert dict(result.errors) == expected
        assert result.token_ids[1:] == [0] * 4
    logits = torch.randn(2, 50)
    again = [sampler.sample(x, [0, 2]).token_ids for sampler, x in
             ((host, logits), (device, logits.to(triton_device)))]  # fmt: skip
    assert again[0] == again[1]


@pytest.mark.full
def test_penalties_of_long_repetitions(make, triton_device):
    """Counts on the device equal those that the host would keep, also after a slot is reused."""
    request = make_request(frequency_penalty=0.01, presence_penalty=0.5, repetition_penalty=1.2)
    host, device = make([request])
    logits = torch.zeros(1, 50)
    logits[0, :5] = torch.tensor([3.0, 2.9, 2.8, -1.0, 2.7])
    for _ in range(2):
        for _ in range(20):
            expected = host.sample(logits, [0]).token_ids
            assert device.sample(logits.to(triton_device), [0]).token_ids == expected
        for sampler in (host, device):
            sampler.remove(0)
            sampler.add(0, request)


def test_more_edits_than_the_capacity(make, triton_device):
    requests = [
        make_request(logit_bias={3: 5.0}, **RANDOM),
        make_request(logit_bias={token: float(token) for token in range(45)}, **RANDOM),
        make_request(logit_bias={7: 1000.0}),
    ]
    host, device = make(requests)
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    expected = host.sample(logits, range(3)).token_ids
    assert device.sample(logits.to(triton_device), range(3)).token_ids == expected
    assert expected[2] == 7


@pytest.mark.full
def test_launched_before_the_previous_one_is_finished(make, triton_device):
    """Three launches in a row, whose logits are overwritten before they are finished."""
    requests = [
        make_request(**RANDOM, repetition_penalty=1.5, min_tokens=2, stop_token_ids=[4]),
        make_request(frequency_penalty=2.0, logprobs=2),
    ]
    host, device = make(requests)
    steps = torch.randn(3, 2, 50, generator=torch.Generator().manual_seed(5)) * 2
    expected = [host.sample(logits, [0, 1]) for logits in steps]
    pending = []
    for logits in steps.to(triton_device):
        pending.append(device.launch(logits, [0, 1]))
        logits.fill_(torch.nan)
    on_device = [one.token_ids.tolist() for one in pending]
    found = [one.finish() for one in pending]
    assert [one.token_ids for one in found] == [one.token_ids for one in expected] == on_device
    assert [one.logprobs[1].keys() for one in found] == [one.logprobs[1].keys() for one in expected]


def test_a_slot_may_be_reused_before_the_finish(make, triton_device):
    """A token sampled for the previous request of a slot does not affect the next one."""
    _, device = make([make_request()])
    pending = device.launch(torch.zeros(1, 50, device=triton_device), [0])
    device.remove(0)
    device.add(0, make_request(no_repeat_ngram_size=1, prompt_token_ids=(5,)))
    assert pending.finish().token_ids == [0]
    logits = torch.zeros(1, 50, device=triton_device)
    logits[0, 5] = 1.0
    # 5 is in the prompt, 0 is not in the text yet
    assert device.sample(logits, [0]).token_ids == [0]
    assert device.sample(logits, [0]).token_ids == [1]


@pytest.mark.parametrize(
    ("own", "needs_host"),
    [
        ({}, False),
        ({"repetition_penalty": 1.3, "logit_bias": {3: 1.0}, "min_tokens": 3}, False),
        ({"bad_words_token_ids": ((3,),)}, False),
        ({"bad_words_token_ids": ((3, 4),)}, True),
        ({"no_repeat_ngram_size": 2}, True),
        ({"reasoning_max_tokens": 2, "reasoning_end_ids": (4,)}, True),
    ],
)
def test_which_requests_need_the_host(make, own, needs_host):
    _, device = make([make_request(), make_request(**own)])
    assert device.needs_host([0, 1]) == needs_host
    assert not device.needs_host([0])


def test_maxima_that_are_known(make, triton_device):
    """Known maxima are used for greedy requests without rules only."""
    _, device = make([make_request(), make_request(), make_request(logit_bias={9: 50.0})])
    logits = torch.randn(3, 50, device=triton_device)
    known = torch.tensor([4, 5, 6], device=triton_device)
    peaks = torch.tensor([1.0, torch.nan, 1.0], device=triton_device)
    found = device.sample(logits[:2], [0, 1], largest=(known[:2], peaks[:2]))
    assert found.token_ids == [4, 0]
    assert dict(found.errors) == {1: NOT_FINITE}
    found = device.sample(logits, [0, 1, 2], largest=(known, peaks))
    assert found.token_ids == [*logits[:2].argmax(1).tolist(), 9]


@pytest.mark.parametrize("has_kernels", [False, True])
def test_make_sampler(triton_device, kernels, has_kernels):
    from mmdeploy_llm.engine.runner.sampling.cuda_sampler import CudaSampler

    sampler = make_sampler(
        max_num_slots=2,
        vocab_size=20,
        device=triton_device,
        grammars=None,
        processors=None,
        kernels=kernels if has_kernels else TORCH,
    )
    assert type(sampler) is (CudaSampler if has_kernels else Sampler)
    sampler.add(1, make_request())
    logits = torch.arange(20.0, device=triton_device)[None]
    assert sampler.sample(logits, [1]).token_ids == [19]
