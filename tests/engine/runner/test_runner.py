"""The runner with a small fake model: a request that fails does not affect the tokens of the
others."""

import pytest
import torch

from mmdeploy_llm.engine.runner.runner import Runner
from mmdeploy_llm.engine.runner.sampling.sampler import Sampler
from mmdeploy_llm.engine.runner.slots import Slots
from mmdeploy_llm.engine.startup.warm_up import warm_up
from mmdeploy_llm.layers.attention.cache_memory import KVCacheShape, allocate
from mmdeploy_llm.layers.attention.reference import ReferenceAttention
from mmdeploy_llm.request import MediaInput, MediaSpan
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.plan import NewRequest, ScheduledTokens, StepPlan

VOCAB, HIDDEN, BLOCK = 50, 8, 4
POISON, BROKEN, STRANGE = 13, 17, 19  # tokens at which the fake model misbehaves
CPU = torch.device("cpu")


class FakeModel:
    """A model whose next token is the last one + 1. POISON raises, BROKEN gives NaN, STRANGE has no
    positions."""

    num_layers, num_kv_heads, head_dim, hidden_size = 1, 1, HIDDEN, HIDDEN

    def __init__(self):
        self.num_forwards = 0

    def forward(self, inputs):
        self.num_forwards += 1
        if (inputs.token_ids == POISON).any():
            raise RuntimeError("poisoned")
        heads = torch.zeros(len(inputs.token_ids), 1, HIDDEN)
        inputs.attn.attend(0, heads, heads, heads)
        hidden = inputs.token_ids[:, None].float().repeat(1, HIDDEN)
        return inputs.merge_media(hidden)

    def logits(self, hidden):
        token_ids = hidden[:, 0].long()
        logits = torch.zeros(len(hidden), VOCAB)
        logits[torch.arange(len(hidden)), (token_ids + 1) % VOCAB] = 5.0
        logits[token_ids == BROKEN] = float("nan")
        return logits

    def encode_media(self, items):
        if any(item.key == "bad" for item in items):
            raise ValueError("bad pixels")
        return [torch.full((item.num_tokens, HIDDEN), 30.0) for item in items]

    def positions(self, num_tokens, media):
        if any(span.item.key == "strange" for span in media):
            raise ValueError("no such grid")
        return torch.arange(num_tokens).repeat(3, 1)


@pytest.fixture
def model():
    return FakeModel()


@pytest.fixture
def runner(model):
    shape = KVCacheShape.uniform(
        num_layers=1, num_kv_heads=1, head_dim=HIDDEN, block_size=BLOCK, dtype=torch.float32
    )
    return Runner(
        model=model,
        backend=ReferenceAttention(),
        cache=allocate(shape, 16, CPU),
        sampler=Sampler(max_num_slots=4, vocab_size=VOCAB, device=CPU),
        slots=Slots(4, 32, BLOCK),
        device=CPU,
    )


def params(**values):
    neutral = {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": 0,
        "max_tokens": 9,
    }
    return SamplingParams(**{**neutral, **values})


def new(request_id, token_ids, media=(), **values):
    return NewRequest(
        request_id=request_id,
        token_ids=tuple(token_ids),
        prompt_len=len(token_ids),
        params=params(**values),
        eos_token_ids=frozenset(),
        media=media,
    )


def item(key, num_tokens=2):
    return MediaInput(kind="image", tensors={"x": torch.ones(1)}, num_tokens=num_tokens, key=key)


def plan(*requests, encode=(), **fields):
    """Returns one step with the prompts of all requests, each in its own block."""
    scheduled = tuple(
        ScheduledTokens(
            request_id=request.request_id,
            start=0,
            num_tokens=len(request.token_ids),
            new_block_ids=(number,),
        )
        for number, request in enumerate(requests)
    )
    return StepPlan(step_id=1, new=requests, encode=encode, scheduled=scheduled, **fields)


def test_every_request_gets_its_next_token(runner):
    result = runner.run(plan(new("a", [3]), new("b", [5, 6])))
    assert result.sampled == {"a": 4, "b": 7}
    decode = StepPlan(
        step_id=2,
        scheduled=(
            ScheduledTokens(request_id="a", start=1, num_tokens=1),
            ScheduledTokens(request_id="b", start=2, num_tokens=1),
        ),
    )
    assert runner.run(decode).sampled == {"a": 5, "b": 8}


def test_run_is_start_and_finish(runner, model):
    """A sampler on the host has nothing to overlap: only `finish` computes, once."""
    requests = (new("a", [3]), new("poison", [POISON]), new("b", [5, 6], logprobs=1))
    started = runner.start(plan(*requests))
    assert not runner.can_overlap
    assert not started.can_follow
    assert started.token_ids is None
    assert model.num_forwards == 0
    found = started.finish()
    assert model.num_forwards == 4
    names = tuple(one.request_id for one in requests)
    assert runner.run(plan(*requests, drop=names)) == found
    assert set(found.sampled) == {"a", "b"}


def test_a_request_at_which_the_model_raises_fails_alone(runner, model):
    result = runner.run(plan(new("a", [3]), new("poison", [POISON]), new("b", [5, 6])))
    assert result.sampled == {"a": 4, "b": 7}
    assert set(result.errors) == {"poison"}
    assert "RuntimeError: poisoned" in result.errors["poison"].message
    assert model.num_forwards == 4  # once together, then one by one


def test_nan_logits_fail_their_request_only(runner):
    result = runner.run(plan(new("a", [3]), new("broken", [BROKEN])))
    assert result.sampled == {"a": 4}
    assert "not finite" in result.errors["broken"].message


def test_media_that_cannot_be_encoded_fail_their_requests_only(runner):
    bad, good = item("bad"), item("good")
    result = runner.run(
        plan(
            new("a", [3, 0, 0], (MediaSpan(offset=1, item=bad),)),
            new("b", [3, 0, 0], (MediaSpan(offset=1, item=good),)),
            encode=(bad, good),
        )
    )
    assert result.sampled == {"b": 31}  # the token after the image's embeddings
    assert "bad pixels" in result.errors["a"].message


def test_media_that_were_never_encoded(runner):
    """A wrong plan, or a cache that lost an item, gives an error, not a wrong answer."""
    lost = item("lost")
    result = runner.run(plan(new("a", [3, 0, 0], (MediaSpan(offset=1, item=lost),))))
    assert "not available" in result.errors["a"].message


def test_a_request_that_cannot_start_fails_alone(runner):
    strange = item("strange")
    result = runner.run(
        plan(new("a", [3]), new("strange", [STRANGE, 0], (MediaSpan(offset=0, item=strange),)))
    )
    assert result.sampled == {"a": 4}
    assert "no such grid" in result.errors["strange"].message


def test_logprobs_of_prompt_and_output(runner):
    result = runner.run(plan(new("a", [3, 4, 9], logprobs=1, prompt_logprobs=0), new("b", [5])))
    none, first, second = result.prompt_logprobs["a"]
    assert none is None
    assert first[4].rank == 1  # 4 follows 3
    assert second[9].rank > 1  # 9 does not follow 4
    assert next(iter(result.logprobs["a"][0])) == 10
    assert "b" not in result.prompt_logprobs


def test_prompt_logprobs_over_two_chunks(runner):
    request = new("a", [3, 4, 9], prompt_logprobs=0)
    chunks = [
        ScheduledTokens(request_id="a", start=0, num_tokens=2, new_block_ids=(0,), samples=False),
        ScheduledTokens(request_id="a", start=2, num_tokens=1),
    ]
    first = runner.run(StepPlan(step_id=1, new=(request,), scheduled=(chunks[0],)))
    assert first.sampled == {}
    assert [entry is None for entry in first.prompt_logprobs["a"]] == [True, False, False]
    second = runner.run(StepPlan(step_id=2, scheduled=(chunks[1],)))
    assert second.prompt_logprobs["a"] == ()
    assert second.sampled == {"a": 10}


def test_dropped_requests_free_their_slots(runner):
    for number in range(9):
        result = runner.run(plan(new(f"r{number}", [3]), drop=(f"r{number - 1}", "unknown")))
        assert result.sampled == {f"r{number}": 4}


def test_warm_up_leaves_nothing_behind(runner, model):
    warm_up(runner.run, 16, BLOCK)
    assert model.num_forwards == 2
    requests = [new(f"r{number}", [3]) for number in range(4)]
    assert len(runner.run(plan(*requests)).sampled) == 4


def test_a_failing_warm_up_is_logged(runner, model, monkeypatch, caplog):
    monkeypatch.setattr(model, "forward", lambda inputs: 1 / 0)
    warm_up(runner.run, 16, BLOCK)
    assert "the warm-up step failed" in caplog.text
