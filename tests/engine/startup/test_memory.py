"""The size of the KV cache on a card, with a model whose steps take known amounts of memory."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mmdeploy_llm.engine.runner.runner import Runner
from mmdeploy_llm.engine.runner.sampling.sampler import Sampler
from mmdeploy_llm.engine.runner.slots import Slots
from mmdeploy_llm.engine.startup import memory, sizes
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import MediaInput, MediaProcessor
from mmdeploy_llm.layers import Experts, Linear
from mmdeploy_llm.layers.attention.cache_memory import allocate
from mmdeploy_llm.layers.attention.reference import ReferenceAttention
from mmdeploy_llm.system.sharding.peers import NoPeers
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.options.runtime_config import (
    AttentionChoice,
    MachineLimits,
    ModelLimits,
    resolve,
)

CPU = torch.device("cpu")
VOCAB, HIDDEN, BLOCK = 50, 8, 16
PER_TOKEN, PER_MEDIA_TOKEN, LEFT = 1000, 70_000, 2 * 10**9


class Meter:
    """Counts the memory that the model below allocates and frees."""

    def __init__(self, available=LEFT):
        self.now = self.most = self.started = 0
        self.left = available

    def take(self, num_bytes):
        self.now += num_bytes
        self.most = max(self.most, self.now)

    def start(self):
        self.most = self.started = self.now

    def peak(self):
        return self.most - self.started

    def available(self):
        return self.left


class Model:
    num_layers, num_kv_heads, head_dim, hidden_size = 1, 1, HIDDEN, HIDDEN

    def __init__(self, meter):
        self.meter = meter
        self.steps, self.media = [], []

    def forward(self, inputs):
        num_tokens = len(inputs.token_ids)
        self.steps.append(num_tokens)
        self.meter.take(num_tokens * PER_TOKEN)
        self.meter.take(-num_tokens * PER_TOKEN)
        heads = torch.zeros(num_tokens, 1, HIDDEN)
        inputs.attn.attend(0, heads, heads, heads)
        return torch.zeros(num_tokens, HIDDEN)

    def logits(self, hidden):
        return torch.zeros(len(hidden), VOCAB)

    def encode_media(self, items):
        num_tokens = sum(item.num_tokens for item in items)
        self.media.append([item.num_tokens for item in items])
        self.meter.take(num_tokens * PER_MEDIA_TOKEN)
        self.meter.take(-num_tokens * PER_MEDIA_TOKEN)
        return [torch.zeros(item.num_tokens, HIDDEN) for item in items]

    def positions(self, num_tokens, media):
        return None


class Processor(MediaProcessor):
    token, markers = "<i>", ("<i>",)
    is_closed = False

    def __init__(self, num_tokens, kind="image"):
        self.num_tokens, self.kind = num_tokens, kind

    def decode(self, source, limits): ...
    def process(self, item, options): ...
    def count_tokens(self, item, options): ...

    def largest(self, max_tokens):
        if self.num_tokens is None:
            return None
        num_tokens = min(self.num_tokens, max_tokens)
        pixels = torch.zeros(num_tokens, 100)
        return MediaInput(
            kind=self.kind, tensors={"pixels": pixels}, num_tokens=num_tokens, key="largest"
        )

    def close(self):
        self.is_closed = True


def runtime(**options):
    config = EngineConfig(
        model="m",
        **{"max_model_len": 60, "max_num_batched_tokens": 128, "max_num_seqs": 8, **options},
    )
    limits = ModelLimits(dtype="float32", max_position_embeddings=4096, hidden_size=HIDDEN)
    host = MachineLimits(has_cuda=True, num_cpus=1, num_threads=1)
    choice = AttentionChoice(name="reference", block_size=BLOCK)
    return resolve(config, limits, host, lambda needs: choice)


@pytest.fixture
def meter():
    return Meter()


@pytest.fixture
def model(meter):
    return Model(meter)


def measured(runtime, model, meter, processors, peers=None):
    measured = []

    def new_runner(num_blocks):
        measured.append(num_blocks)
        return Runner(
            model=model,
            backend=ReferenceAttention(),
            cache=allocate(sizes.kv_cache_shape(model, on_cpu), num_blocks, CPU),
            sampler=Sampler(max_num_slots=runtime.max_num_seqs, vocab_size=VOCAB, device=CPU),
            slots=Slots(runtime.max_num_seqs, runtime.max_model_len, BLOCK),
            device=CPU,
        )

    on_cpu = SimpleNamespace(block_size=BLOCK, kv_cache_dtype="float32", dtype="float32")
    found = memory.measured_memory(
        new_runner, processors, runtime, model, meter, peers or NoPeers()
    )
    assert set(measured) == {4}  # blocks of the longest request, 59 tokens
    return found


def test_the_largest_steps_are_run(model, meter):
    left = measured(runtime(), model, meter, {})
    assert model.steps == [128, 128, 8]  # long prompts, many prompts, a decode of all
    # Prefill activations, and once more those of a decode step for the graphs.
    assert left == LEFT - 128 * PER_TOKEN - 8 * PER_TOKEN


@pytest.mark.full
def test_without_graphs_no_memory_is_reserved_for_them(model, meter):
    left = measured(runtime(enforce_eager=True), model, meter, {})
    assert left == LEFT - 128 * PER_TOKEN


@pytest.mark.full
def test_the_largest_media_decide(model, meter):
    processors = {"image": Processor(40), "video": Processor(50, "video")}
    given = runtime(encoder_cache_memory=4 * HIDDEN * 55)
    left = measured(given, model, meter, processors)
    assert model.media == [[40, 40, 40], [50, 50]]  # as many as a step may encode
    assert left == LEFT - 120 * PER_MEDIA_TOKEN - 8 * PER_TOKEN - 4 * HIDDEN * 55
    assert all(processor.is_closed for processor in processors.values())


@pytest.mark.full
def test_media_are_no_larger_than_a_request_or_the_encoder_cache(model, meter):
    measured(runtime(), model, meter, {"image": Processor(1000)})
    assert model.media == [[58, 58]]
    model.media.clear()
    small = runtime(encoder_cache_memory=4 * HIDDEN * 7)
    measured(small, model, meter, {"image": Processor(1000)})
    assert model.media[0][0] == 7


@pytest.mark.full
def test_media_that_would_take_more_than_half_are_measured_smaller(
    model, meter, monkeypatch, caplog
):
    monkeypatch.setattr(memory, "MIN_MEDIA", 10)
    monkeypatch.setattr(memory, "values_per_call", lambda device: 1000)
    given = runtime(encoder_cache_memory=4 * HIDDEN * 58)
    meter.left = 58 * PER_MEDIA_TOKEN + 10**6
    left = measured(given, model, meter, {"image": Processor(1000)})
    assert model.media == [[58], [14]]
    assert left == meter.left - 14 * PER_MEDIA_TOKEN - 8 * PER_TOKEN - 4 * HIDDEN * 58
    assert "items of more than 14 tokens may find no memory" in caplog.text


@pytest.mark.full
def test_media_that_take_too_much_on_another_rank_are_measured_smaller_on_all(
    model, meter, monkeypatch
):
    """A rank that continued alone would leave the others waiting in an exchange."""
    monkeypatch.setattr(memory, "MIN_MEDIA", 10)
    monkeypatch.setattr(memory, "values_per_call", lambda device: 1000)
    said, answers = [], [False, True]
    peers = NoPeers()
    peers.agree = lambda is_fine: said.append(is_fine) or answers.pop(0)
    given = runtime(encoder_cache_memory=4 * HIDDEN * 58)
    measured(given, model, meter, {"image": Processor(1000)}, peers)
    assert said == [True, True]
    assert model.media == [[58], [14]]


@pytest.mark.full
def test_kinds_that_are_not_allowed_take_no_memory(model, meter):
    given = runtime(limit_mm_per_prompt={"video": 0})
    measured(given, model, meter, {"image": Processor(None), "video": Processor(9, "video")})
    assert model.media == []


def test_no_memory_left_names_what_uses_it(model, meter):
    meter.left = 100 * PER_TOKEN
    with pytest.raises(
        ConfigError, match=r"steps of 128 tokens .* nothing is left for the KV cache"
    ):
        measured(runtime(), model, meter, {})


def test_a_step_that_fails_raises_with_its_error(model, meter, caplog):
    model.logits = lambda hidden: 1 / 0
    assert measured(runtime(enforce_eager=True), model, meter, {}) == LEFT - 128 * PER_TOKEN
    assert "a step that measures memory failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


class Weights(nn.Module):
    num_layers, num_kv_heads, head_dim = 2, 4, 16

    def __init__(self):
        super().__init__()
        self.large = nn.Linear(1000, 1000, bias=False)
        self.gate = nn.Linear(10, 10, bias=False)
        self.gate.fp32_parameters = ("weight",)


def test_bytes_of_weights_as_they_are_loaded():
    with torch.device("meta"):
        model = Weights()
    assert sizes.weight_bytes(model, torch.bfloat16) == 2 * 1000**2 + 4 * 10**2


def test_bytes_of_weights_that_may_stay_in_few_bits():
    """The least that they take, biases aside; a plain layer of torch never stays so, experts do."""
    with torch.device("meta"):
        experts = Experts(4, 100, 10)
        model = nn.Sequential(Linear(100, 10, bias=True), nn.Linear(100, 10, bias=False), experts)
    found = sizes.weight_bytes(model, torch.bfloat16, bits=4)
    assert found == 1000 // 2 + 2 * 10 + 2 * 1000 + 4 * 3 * 1000 // 2


def test_a_card_too_small_raises_before_anything_is_read(monkeypatch):
    given = runtime()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**20, 2**21))
    with pytest.raises(ConfigError, match=r"cuda has 0\.00 GiB, .* the weights need 0\.00"):
        sizes.check_size(Weights(), given)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**30))
    model = Weights()
    assert sizes.check_size(model, given) is model
