"""Steps that start before the previous one has finished produce the same outputs as steps that run
one after the other. The sampler of these tests hands its tokens to the next step at once and to the
host only on `finish`, as a sampler on a device does."""

import random
from types import SimpleNamespace

import pytest
import torch

from mmdeploy_llm.engine.delivery.delivery import Delivery
from mmdeploy_llm.engine.engine import Engine
from mmdeploy_llm.engine.runner.runner import Runner
from mmdeploy_llm.engine.runner.sampling.sampler import Sampler
from mmdeploy_llm.engine.runner.slots import Slots
from mmdeploy_llm.engine.schedule.scheduler import Scheduler, SchedulerConfig
from mmdeploy_llm.hooks import EngineInfo, PluginManager
from mmdeploy_llm.layers.attention.cache_memory import KVCacheShape, allocate
from mmdeploy_llm.request import Request
from mmdeploy_llm.testing.tiny import VOCAB_SIZE, make_tokenizer
from mmdeploy_llm.values.params import SamplingParams

CPU = torch.device("cpu")
NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 0, "repetition_penalty": 1.0}
NEUTRAL |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
HIDDEN, BLOCK, LENGTH, SEQS = 8, 4, 48, 6
EOS = 7


class LaunchingSampler(Sampler):
    """A sampler whose launches overlap with the next step. needing_host: whether every request has
    to wait for the host."""

    can_overlap = True
    needing_host = False
    num_open = 0
    fails_at = None
    num_launches = 0

    def launch(self, logits, slots, *, largest=None):
        self.num_launches += 1
        if self.num_launches == self.fails_at:
            raise RuntimeError("no launch")
        result = super().launch(logits.clone(), slots).finish()
        self.num_open += 1

        def finish():
            self.num_open -= 1
            return result

        return SimpleNamespace(token_ids=torch.tensor(result.token_ids), finish=finish)

    def needs_host(self, slots):
        return self.needing_host


class Model:
    """A model with one attention layer, so that a token of a wrong position or step changes the
    output."""

    num_layers, num_kv_heads, head_dim, hidden_size = 1, 1, HIDDEN, HIDDEN

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.embed = torch.randn(VOCAB_SIZE, HIDDEN, generator=generator)
        self.place = torch.randn(LENGTH, HIDDEN, generator=generator)
        self.head = 3 * torch.randn(HIDDEN, VOCAB_SIZE, generator=generator)
        self.most = None

    def forward(self, inputs):
        if self.most is not None and len(inputs.token_ids) > self.most:
            raise torch.OutOfMemoryError("out of memory")
        hidden = self.embed[inputs.token_ids] + self.place[inputs.positions]
        heads = hidden[:, None]
        return hidden + inputs.attn.attend(0, heads, heads, heads)[:, 0]

    def logits(self, hidden):
        return hidden @ self.head

    def positions(self, num_tokens, media):
        return None


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def graphs(load_file):
    return load_file("engine/runner/test_graphs.py")


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def make(graphs, tokenizer):
    return engines(graphs, tokenizer)


def engines(graphs, tokenizer):
    """Makes an engine; sampler: of its runner. num_blocks: few of them make it preempt."""

    def build(sampler, *, num_blocks=64, has_graphs=True):
        runner = new_runner(graphs, sampler, Model(), num_blocks)
        if has_graphs:
            runner.record_graphs([1, 2, 4, SEQS], graphs.Recorder())
        return new_engine(runner, tokenizer, num_blocks)

    return build


def new_runner(graphs, sampler, model, num_blocks=64, **options):
    shape = KVCacheShape.uniform(
        num_layers=1, num_kv_heads=1, head_dim=HIDDEN, block_size=BLOCK, dtype=torch.float32
    )
    return Runner(
        model=model,
        backend=graphs.TensorAttention(),
        cache=allocate(shape, num_blocks, CPU),
        sampler=sampler(max_num_slots=SEQS, vocab_size=VOCAB_SIZE, device=CPU),
        slots=Slots(SEQS, LENGTH, BLOCK),
        device=CPU,
        **options,
    )


def new_engine(runner, tokenizer, num_blocks=64):
    config = SchedulerConfig(
        max_num_seqs=SEQS,
        max_num_batched_tokens=16,
        max_model_len=LENGTH,
        num_blocks=num_blocks,
        block_size=BLOCK,
    )
    info = EngineInfo(
        model="m",
        architecture="A",
        device="cpu",
        dtype="float32",
        num_blocks=num_blocks,
        block_size=BLOCK,
        max_num_seqs=SEQS,
        max_model_len=LENGTH,
    )
    return Engine(
        scheduler=Scheduler(config),
        runner=runner,
        delivery=Delivery(tokenizer),
        plugins=PluginManager.load(plugins=()),
        info=info,
    )


def requests(seed, count=14):
    rng = random.Random(seed)
    for number in range(count):
        options = {"temperature": 0.0} if number % 3 else {"temperature": 1.0, "seed": number}
        if number % 4 == 1:
            options["stop"] = ["e", "the"]
        if number % 5 == 2:
            options["logprobs"] = 1
        if number % 7 == 3:
            options |= {"repetition_penalty": 1.2, "prompt_logprobs": 0}
        if number % 5 == 3:
            options["early_stop"] = {"window_size": 2, "threshold": 0.0}
        if number % 4 == 2:
            options["stop_words_ids"] = [*range(200), [250, 251]]
        if number % 6 == 4:
            options["ignore_eos"] = True
        ids = [rng.randrange(30, 300) for _ in range(rng.randint(1, 20))]
        yield Request(
            request_id=f"r{number}",
            prompt="",
            prompt_token_ids=ids,
            params=SamplingParams(max_tokens=rng.randint(1, 26), **{**NEUTRAL, **options}),
            eos_token_ids=frozenset(range(EOS, VOCAB_SIZE, 40)),
            arrival_time=float(number),
        )


def outputs_of(engine, given, *, seed=0, aborts=()):
    """Returns request id -> its joined output, while new requests arrive between steps. aborts:
    steps at which the request that arrived last is aborted."""
    rng, waiting, found, last = random.Random(seed), list(given), {}, "nobody"
    for step in range(2000):
        if rng.random() < 0.4 and waiting:
            last = waiting[0].request_id
            engine.add(waiting.pop(0))
        engine.abort([last] * (step in aborts))
        if not engine.has_work:
            if not waiting:
                return found
            continue
        for output in engine.step():
            text, ids, *_ = found.get(output.request_id, ("", ()))
            text += output.outputs.text
            ids += tuple(output.outputs.token_ids)
            reason = output.outputs.finish_reason
            found[output.request_id] = (text, ids, reason, output.error_msg)
        engine._scheduler.check_integrity()
    raise AssertionError("the engine does not come to an end")


class Counting:
    """Counts the steps that started before the previous one had finished."""

    def __init__(self, engine):
        self.num_ahead = 0
        start = engine._runner.start

        def counted(plan, before=None):
            self.num_ahead += before is not None
            return start(plan, before)

        engine._runner.start = counted


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("seed", "num_blocks", "has_graphs"), [(0, 64, True), (1, 14, True), (2, 14, False)]
)
def test_the_same_outputs(make, seed, num_blocks, has_graphs):
    options = {"num_blocks": num_blocks, "has_graphs": has_graphs}
    expected = outputs_of(make(Sampler, **options), requests(seed), seed=seed)
    engine = make(LaunchingSampler, **options)
    counting = Counting(engine)
    assert outputs_of(engine, requests(seed), seed=seed) == expected
    assert {reason for _, _, reason, _ in expected.values()} == {"stop", "length", "repetition"}
    assert counting.num_ahead > 10


def test_aborted_requests(make):
    expected = outputs_of(make(Sampler), requests(5))
    engine = make(LaunchingSampler)
    found = outputs_of(engine, requests(5), aborts=range(5, 60, 4))
    assert set(found) == set(expected)
    ended = {name for name, output in found.items() if output[2] == "abort"}
    assert ended
    for name in set(found) - ended:
        assert found[name] == expected[name]


def test_requests_that_need_the_host_do_not_overlap(make, monkeypatch):
    monkeypatch.setattr(LaunchingSampler, "needing_host", True)
    engine = make(LaunchingSampler)
    counting = Counting(engine)
    assert outputs_of(engine, requests(1)) == outputs_of(make(Sampler), requests(1))
    assert counting.num_ahead == 0


@pytest.mark.one_is_quick
@pytest.mark.parametrize("fails_at", [1, 5])
def test_a_step_that_cannot_start_early_runs_after_the_previous_one(make, monkeypatch, fails_at):
    monkeypatch.setattr(LaunchingSampler, "fails_at", fails_at)
    engine = make(LaunchingSampler)
    assert outputs_of(engine, requests(2)) == outputs_of(make(Sampler), requests(2))


def test_a_step_without_memory_is_retried_in_smaller_passes(make):
    expected = outputs_of(make(Sampler, has_graphs=False), requests(3))
    engine = make(LaunchingSampler, has_graphs=False)
    engine._runner._model._model.most = 4
    assert outputs_of(engine, requests(3)) == expected


def test_no_launch_is_left_open_and_later_requests_run(make):
    """The last overlapped step holds only requests that have ended; the steps of later requests
    follow it."""
    engine = make(LaunchingSampler)
    expected = outputs_of(make(Sampler), requests(4, 5))
    assert outputs_of(engine, requests(4, 5)) == expected
    assert engine._runner._sampler.num_open <= 1
    again = outputs_of(engine, requests(4, 5))
    assert {name: output[1] for name, output in again.items()} == {
        name: output[1] for name, output in expected.items()
    }
