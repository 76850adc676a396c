"""A pass that runs out of memory is retried in smaller ones; only a request that is too large by
itself fails."""

import errno
from weakref import WeakSet

import pytest
import torch

from mmdeploy_llm import EngineConfig
from mmdeploy_llm.engine.runner.retry import GOOD_PASSES, PassSize
from mmdeploy_llm.engine.runner.runner import Runner
from mmdeploy_llm.engine.runner.sampling.sampler import Sampler
from mmdeploy_llm.engine.runner.slots import Slots
from mmdeploy_llm.engine.startup.start import explaining_memory
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.layers.attention.cache_memory import KVCacheShape, allocate
from mmdeploy_llm.layers.attention.out_of_memory import is_out_of_memory
from mmdeploy_llm.layers.attention.reference import ReferenceAttention
from mmdeploy_llm.request import MediaInput, MediaSpan
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.plan import NewRequest, ScheduledTokens, StepPlan

CPU = torch.device("cpu")
VOCAB, HIDDEN, BLOCK = 50, 8, 16
SHORT = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"


class SmallMemory:
    """A model that counts on from the last token. A pass of more than `most` tokens, or one with
    the token `heavy`, runs out of memory."""

    num_layers, num_kv_heads, head_dim, hidden_size = 1, 1, HIDDEN, HIDDEN
    most, heavy = 8, 49

    def __init__(self):
        self.sizes = []
        self.held = WeakSet()

    def forward(self, inputs):
        assert not self.held, "a failed pass still holds its memory"
        activations = Activations()
        self.held.add(activations)
        self.sizes.append(len(inputs.token_ids))
        if len(inputs.token_ids) > self.most or (inputs.token_ids == self.heavy).any():
            raise torch.OutOfMemoryError(SHORT)
        heads = torch.zeros(len(inputs.token_ids), 1, HIDDEN)
        inputs.attn.attend(0, heads, heads, heads)
        return inputs.token_ids[:, None].float().repeat(1, HIDDEN)

    def logits(self, hidden):
        return 5.0 * torch.nn.functional.one_hot((hidden[:, 0].long() + 1) % VOCAB, VOCAB).float()

    def encode_media(self, items):
        assert not self.held, "a failed call still holds its memory"
        activations = Activations()
        self.held.add(activations)
        if sum(item.num_tokens for item in items) > self.most:
            raise torch.OutOfMemoryError(SHORT)
        return [torch.ones(item.num_tokens, HIDDEN) for item in items]

    def positions(self, num_tokens, media):
        return None


class Activations:
    """Memory that a pass holds while it runs."""


@pytest.fixture
def model():
    return SmallMemory()


@pytest.fixture
def runner(model):
    return make(model)


def make(model, *, has_atomic_media=False):
    shape = KVCacheShape.uniform(
        num_layers=1, num_kv_heads=1, head_dim=HIDDEN, block_size=BLOCK, dtype=torch.float32
    )
    return Runner(
        model=model,
        backend=ReferenceAttention(),
        cache=allocate(shape, 16, CPU),
        sampler=Sampler(max_num_slots=12, vocab_size=VOCAB, device=CPU),
        slots=Slots(12, 64, BLOCK),
        device=CPU,
        has_atomic_media=has_atomic_media,
    )


def new(name, token_ids, media=(), **values):
    neutral = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 0}
    penalties = dict.fromkeys(("presence_penalty", "frequency_penalty"), 0.0)
    params = SamplingParams(**neutral, **penalties, repetition_penalty=1.0, max_tokens=9, **values)
    return NewRequest(
        request_id=name,
        token_ids=tuple(token_ids),
        prompt_len=len(token_ids),
        params=params,
        eos_token_ids=frozenset(),
        media=media,
    )


def plan(*requests, encode=()):
    scheduled = tuple(
        ScheduledTokens(
            request_id=request.request_id,
            start=0,
            num_tokens=len(request.token_ids),
            new_block_ids=(2 * number, 2 * number + 1),
        )
        for number, request in enumerate(requests)
    )
    return StepPlan(step_id=1, new=requests, scheduled=scheduled, encode=encode)


def test_a_step_that_is_too_large_is_halved(runner, model):
    requests = [new(f"r{number}", [number, number + 1]) for number in range(6)]
    result = runner.run(plan(*requests))
    assert result.sampled == {f"r{number}": number + 2 for number in range(6)}
    assert not result.errors
    assert model.sizes == [12, 6, 6]


def test_the_next_step_starts_with_smaller_passes(runner, model):
    runner.run(plan(*[new(f"r{number}", [number, number + 1]) for number in range(6)]))
    model.sizes.clear()
    decode = tuple(
        ScheduledTokens(request_id=f"r{number}", start=2, num_tokens=1) for number in range(6)
    )
    assert len(runner.run(StepPlan(step_id=2, scheduled=decode)).sampled) == 6
    assert model.sizes == [6]
    result = runner.run(plan(new("a", [3] * 5), new("b", [4] * 5)))
    assert result.sampled == {"a": 4, "b": 5}
    assert model.sizes == [6, 6, 4]


def test_a_long_prompt_is_split_and_its_logprobs_joined(runner, model):
    result = runner.run(plan(new("long", range(1, 21), prompt_logprobs=0)))
    assert result.sampled == {"long": 21}
    assert [entry is None for entry in result.prompt_logprobs["long"]] == [True] + [False] * 19
    assert max(model.sizes[1:]) <= 10
    whole = make(model)
    model.most = 100
    expected = whole.run(plan(new("long", range(1, 21), prompt_logprobs=0)))
    assert result.prompt_logprobs == expected.prompt_logprobs


def test_a_request_that_is_too_large_by_itself_fails_alone(runner, model):
    result = runner.run(plan(new("a", [3]), new("heavy", [model.heavy]), new("b", [5])))
    assert result.sampled == {"a": 4, "b": 6}
    assert set(result.errors) == {"heavy"}
    message = result.errors["heavy"].message
    assert "cpu has not enough memory even for this request alone" in message
    assert "Tried to allocate" not in message
    assert runner.run(plan(new("c", [7]))).sampled == {"c": 8}


def test_a_failed_request_is_not_continued(runner, model):
    """The first half of the prompt runs out of memory even token by token, so the rest is not
    computed."""
    result = runner.run(plan(new("long", [3, model.heavy, *range(10)]), new("b", [5])))
    assert set(result.errors) == {"long"}
    assert result.sampled == {"b": 6}


def test_an_item_that_must_stay_whole_is_not_split(model):
    image = MediaInput(kind="image", tensors={"x": torch.ones(1)}, num_tokens=7, key="i")
    runner = make(model, has_atomic_media=True)
    media = (MediaSpan(offset=1, item=image),)
    result = runner.run(plan(new("a", [3] * 9, media), new("b", [5, 6]), encode=(image,)))
    assert set(result.errors) == {"a"}
    assert result.sampled == {"b": 7}


def test_media_that_do_not_fit_together_are_encoded_one_by_one(runner):
    def image(key, num_tokens):
        return MediaInput(
            kind="image", tensors={"x": torch.ones(1)}, num_tokens=num_tokens, key=key
        )

    small, other, huge = image("small", 5), image("other", 5), image("huge", 9)
    result = runner.run(
        plan(
            new("a", [3] * 6, (MediaSpan(offset=0, item=small),)),
            new("b", [3] * 6, (MediaSpan(offset=0, item=other),)),
            new("c", [3] * 10, (MediaSpan(offset=0, item=huge),)),
            encode=(small, other, huge),
        )
    )
    assert set(result.errors) == {"c"}
    assert "the image could not be encoded" in result.errors["c"].message
    assert "out of memory" in result.errors["c"].message
    assert set(result.sampled) == {"a", "b"}


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(SHORT),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: not enough memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_out_of_memory_errors_are_recognized(error):
    assert is_out_of_memory(error)


def test_other_errors_are_not_out_of_memory():
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
    assert not is_out_of_memory(ValueError("DefaultCPUAllocator"))


def item(name, start, num_tokens, **values):
    return ScheduledTokens(request_id=name, start=start, num_tokens=num_tokens, **values)


def can_split(item):
    return item.num_tokens > 1


def test_passes_keep_order_and_cover_all_tokens_once():
    size = PassSize()
    step = (item("a", 9, 1), item("b", 3, 1), item("c", 0, 10, new_block_ids=(4, 5)))
    assert size.passes(step, can_split) == (step,)
    passes = size.split(step, can_split)
    assert size.max_tokens == 6
    assert passes == (
        [*step[:2], item("c", 0, 4, new_block_ids=(4, 5), samples=False)],
        [item("c", 4, 6)],
    )
    assert tuple(size.passes(step, can_split)) == passes
    assert size.split([item("a", 9, 1)], can_split) == ()


def test_passes_grow_again():
    size = PassSize()
    size.split([item("a", 0, 64)], can_split)
    for _ in range(GOOD_PASSES):
        assert len(size.passes([item("a", 0, 64)], can_split)) == 2
    assert len(size.passes([item("a", 0, 64)], can_split)) == 1


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 128. MiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_memory_that_runs_out_while_loading_is_one_line(error, monkeypatch):
    from typer.testing import CliRunner

    from mmdeploy_llm.cli import program
    from mmdeploy_llm.engine.startup import start

    def read(config):
        raise error

    monkeypatch.setattr(start, "read_model_files", read)
    with pytest.raises(ConfigError, match=r"memory ran out while 'shapes-vl' was loaded"):
        start.start(EngineConfig(model="shapes-vl"))
    done = CliRunner().invoke(program.app, ["generate", "hello"])
    assert done.exit_code == 2
    assert done.stderr.startswith("error: memory ran out while 'shapes-vl' was loaded")
    assert done.stderr.count("\n") == 1


def test_another_error_is_not_taken_for_it():
    with pytest.raises(RuntimeError, match="a bug"), explaining_memory("m"):
        raise RuntimeError("a bug")
