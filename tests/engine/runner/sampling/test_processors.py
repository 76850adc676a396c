"""Logits processors of plugins: which requests they change, in which order, and what a broken one
breaks."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from mmdeploy_llm.engine.runner.sampling.processors import LogitsProcessors
from mmdeploy_llm.engine.runner.sampling.results import NOT_FINITE, NOTHING_ALLOWED
from mmdeploy_llm.engine.runner.sampling.sampler import Sampler
from mmdeploy_llm.errors import ConfigError, PluginError, RequestError
from mmdeploy_llm.hooks import (
    LogitsContext,
    LogitsProcessor,
    LogitsProcessorSpec,
    PluginManager,
    hookimpl,
)
from mmdeploy_llm.values.params import SamplingParams

V = 50
CALLS = []


class Add(LogitsProcessor):
    """Adds `amount` to the logit of `token`; counts its calls."""

    def check(self, arguments):
        if not isinstance(arguments.get("amount", 0), int | float):
            raise ValueError(f"amount must be a number, got {arguments['amount']!r}")
        if arguments.get("token") == "broken":
            raise OSError("no check")

    def apply(self, logits, rows):
        CALLS.append(len(rows))
        for logit, row in zip(logits, rows, strict=True):
            logit[row.arguments.get("token", 0)] += row.arguments.get("amount", 100.0)
        return logits


class Double(LogitsProcessor):
    def apply(self, logits, rows):
        return logits * 2


class Drop(LogitsProcessor):
    """Bans the tokens of the output; its state is what it has seen so far."""

    def start(self, row):
        return {"seen": set(row.output_token_ids)}

    def apply(self, logits, rows):
        for logit, row in zip(logits, rows, strict=True):
            row.state["seen"] |= set(row.output_token_ids)
            logit[list(row.state["seen"])] = -torch.inf
        return logits


class Broken(LogitsProcessor):
    """Fails in the way that `how` says, for prompts that begin with 9."""

    def start(self, row):
        if row.arguments["how"] == "start":
            raise OSError("no start")

    def apply(self, logits, rows):
        logits += 1000  # in place, before it fails
        wrong = [row.prompt_token_ids[0] == 9 for row in rows]
        how = rows[0].arguments["how"]
        if not any(wrong):
            return logits - 1000
        if how == "raise":
            raise OSError("broken")
        if how == "exit":
            raise SystemExit(3)
        values = {"nan": torch.nan, "inf": torch.inf, "banned": -torch.inf}
        if how in values:
            logits -= 1000
            logits[torch.tensor(wrong)] = values[how]
            return logits
        forms = {
            "shape": logits[:, 1:],
            "rows": logits[1:],
            "dtype": logits.double(),
            "type": logits.tolist(),
            "none": None,
            "device": logits.to("meta"),
        }
        return forms[how]


SPECS = [
    LogitsProcessorSpec(
        name="add", factory="acme_logits:Add", arguments=("amount", "token"), aliases=("AddLogits",)
    ),
    LogitsProcessorSpec(name="double", factory="acme_logits:Double"),
    LogitsProcessorSpec(name="drop", factory="acme_logits:Drop"),
    LogitsProcessorSpec(name="broken", factory="acme_logits:Broken", arguments=("how",)),
    LogitsProcessorSpec(name="unbuilt", factory="acme_logits:missing"),
]


@pytest.fixture
def processors(monkeypatch):
    """Returns LogitsProcessors of a plugin in process; positional arguments: those listed."""
    module = ModuleType("acme_logits")
    vars(module).update(Add=Add, Double=Double, Drop=Drop, Broken=Broken)
    monkeypatch.setitem(sys.modules, "acme_logits", module)
    manager = PluginManager()
    plugin = SimpleNamespace(provide_logits_processors=hookimpl(lambda: SPECS))
    manager.register(plugin, "acme")
    context = LogitsContext(vocab_size=V, tokenizer=None)
    CALLS.clear()
    return lambda *listed: LogitsProcessors(manager, context, listed)


@pytest.fixture
def new_sampler(processors):
    """Returns a sampler on the host with these requests in slots 0, 1, ..."""

    def make(requests, *listed):
        device = torch.device("cpu")
        sampler = Sampler(
            max_num_slots=8, vocab_size=V, device=device, processors=processors(*listed)
        )
        for slot, request in enumerate(requests):
            sampler.add(slot, request)
        return sampler

    return make


def logits_of(num_rows, seed=0):
    return torch.randn(num_rows, V, generator=torch.Generator().manual_seed(seed)) * 3


def tokens_of(sampler, num_steps, num_rows):
    slots = list(range(num_rows))
    return [sampler.sample(logits_of(num_rows, step), slots).token_ids for step in range(num_steps)]


def test_it_changes_the_rows_that_name_it_in_one_call(make_request, new_sampler):
    logits = logits_of(4)
    add = {"logits_processors": "add", "logits_processors_args": {"token": 7}}
    requests = [make_request(), make_request(**add), make_request(logprobs=1), make_request(**add)]
    result = new_sampler(requests).sample(logits, [0, 1, 2, 3])
    plain = logits.argmax(dim=1).tolist()
    assert result.token_ids == [plain[0], 7, plain[2], 7]
    assert CALLS == [2]
    assert not result.errors


def test_random_requests_and_the_known_largest_logit(make_request, new_sampler):
    """The largest logit that a recorded step has found is that of before the processor."""
    logits = logits_of(2)
    add = {"logits_processors": "add", "logits_processors_args": {"token": 7}}
    requests = [make_request(**add), make_request(**add, temperature=1.0)]
    largest = logits.argmax(dim=1), logits.amax(dim=1)
    result = new_sampler(requests).sample(logits.clone(), [0, 1], largest=largest)
    assert result.token_ids == [7, 7]


def test_the_order_is_that_of_the_request(make_request, new_sampler):
    """Adding before doubling counts twice."""
    logits = torch.zeros(2, V)
    logits[:, 1] = 5.0
    args = {"token": 2, "amount": 8.0}
    both = ["add", "double"], ["double", "add"]
    requests = [
        make_request(logits_processors=names, logits_processors_args=args, logit_bias={1: 6.0})
        for names in both
    ]
    # 5 * 2 + 6 = 16 against 8 * 2 and against 8; the lowest index wins a tie
    assert new_sampler(requests).sample(logits, [0, 1]).token_ids == [1, 1]
    requests = [
        make_request(logits_processors=names, logits_processors_args=args) for names in both
    ]
    assert new_sampler(requests).sample(logits, [0, 1]).token_ids == [2, 1]


def test_the_rules_of_the_request_have_the_last_word(make_request, new_sampler):
    add = {"logits_processors": "add", "logits_processors_args": {"token": 7, "amount": 1e6}}
    request = make_request(**add, bad_words_token_ids=((7,),))
    assert new_sampler([request]).sample(logits_of(1), [0]).token_ids != [7]


@pytest.mark.parametrize("num_before", [1, 3, 7])
def test_preempted_is_uninterrupted(make_request, new_sampler, num_before):
    drop = {"logits_processors": "drop", "temperature": 0.8}
    whole = [tokens for (tokens,) in tokens_of(new_sampler([make_request(**drop)]), 9, 1)]
    assert len(set(whole)) == 9
    sampler = new_sampler([make_request(**drop, output_token_ids=tuple(whole[:num_before]))])
    again = [sampler.sample(logits_of(1, step), [0]).token_ids[0] for step in range(num_before, 9)]
    assert again == whole[num_before:]


def test_nothing_is_called_for_requests_without_one(make_request, new_sampler):
    sampler = new_sampler([make_request(), make_request(temperature=1.0, logit_bias={3: 1.0})])
    tokens_of(sampler, 2, 2)
    assert CALLS == []
    assert not sampler._state.needs_transforms(torch.tensor([0]).numpy()).any()


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "'broken' of plugin 'acme' failed: OSError: broken"),
        ("exit", "failed: SystemExit"),
        ("nan", "returned logits that are NaN"),
        ("inf", "returned logits that are NaN or [+]inf"),
        ("shape", r"returned logits of shape torch.Size\(\[1, 49\]\); return"),
        ("rows", r"returned logits of shape"),
        ("dtype", "returned logits of dtype torch.float64; return torch.float32"),
        ("type", "returned a list; return the logits"),
        ("none", "returned a NoneType"),
        ("device", "returned logits of device meta; return cpu"),
        ("banned", "logits_processors together ban the whole vocabulary"),
    ],
)
@pytest.mark.parametrize("own", [{}, {"temperature": 0.7}])
def test_a_broken_one_fails_the_requests_at_fault_and_no_other(
    make_request, new_sampler, how, message, own
):
    broken = {"logits_processors": "broken", "logits_processors_args": {"how": how}, **own}
    good = {"logits_processors": ["add"], **own}
    requests = [
        make_request(**broken, prompt_token_ids=(1, 2)),
        make_request(**broken, prompt_token_ids=(9, 2)),
        make_request(**good),
        make_request(**own),
    ]
    logits = logits_of(4)
    result = new_sampler(requests).sample(logits, [0, 1, 2, 3])
    assert result.errors.keys() == {1}
    with pytest.raises(ValueError, match=message):
        raise ValueError(result.errors[1])
    assert result.token_ids[1] == 0
    for row, request in enumerate(requests):
        if row != 1:
            alone = new_sampler([request]).sample(logits[row : row + 1], [0])
            assert alone.token_ids == [result.token_ids[row]]
    plain = new_sampler([make_request(**own)]).sample(logits[:1], [0])
    assert plain.token_ids == [result.token_ids[0]]


def test_logits_of_the_model_that_are_not_finite_are_not_the_processors_fault(
    make_request, new_sampler
):
    logits = logits_of(1)
    logits[0, 3] = torch.nan
    result = new_sampler([make_request(logits_processors="double")]).sample(logits, [0])
    assert result.errors == {0: NOT_FINITE}
    assert "logits_processors" in NOTHING_ALLOWED


def test_one_that_cannot_start_or_be_built_fails_its_request(make_request, new_sampler):
    for name, args, message in (
        ("broken", {"how": "start"}, "'broken' of plugin 'acme' failed to start: OSError"),
        ("unbuilt", {}, "cannot be imported"),
    ):
        request = make_request(logits_processors=name, logits_processors_args=args)
        with pytest.raises(PluginError, match=message):
            new_sampler([request])


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"logits_processors": "ad"}, RequestError, "no logits processor 'ad'; did you mean 'add'"),
        ({"logits_processors": "m:Class"}, RequestError, "not imported by path"),
        ({"logits_processors": "ThinkingBudgetLogitsProcessor"}, RequestError, "reasoning_max_tok"),
        ({"logits_processors_args": {"amount": 1}}, RequestError, "name add in logits_processors"),
        ({"logits_processors_args": {"thinking_budget": 1}}, RequestError, "reasoning_max_tokens"),
        ({"logits_processors": "double", "logits_processors_args": {"x": 1}}, RequestError, "'x'"),
        (
            {"logits_processors": "add", "logits_processors_args": {"amount": "much"}},
            RequestError,
            "logits processor 'add': amount must be a number, got 'much'",
        ),
        (
            {"logits_processors": "add", "logits_processors_args": {"token": "broken"}},
            PluginError,
            "'add' of plugin 'acme' failed to check its arguments: OSError: no check",
        ),
        ({"logits_processors": "unbuilt"}, PluginError, "cannot be imported"),
    ],
)
def test_what_is_refused_before_a_request_starts(processors, params, error, message):
    with pytest.raises(error, match=message):
        processors().check(SamplingParams(**params))


def test_those_that_the_engine_lists_are_switched_on_by_an_argument(
    processors, make_request, new_sampler
):
    """FastDeploy's way; an alias is the same processor, which then runs once."""
    found = processors("AddLogits", "double")
    on = SamplingParams(logits_processors_args={"token": 3}, logits_processors=["ADD", "drop"])
    found.check(on)
    names = [one.built.spec.name for one in found.start(on, (1,), [])]
    assert names == ["add", "drop"]
    assert found.start(SamplingParams(), (1,), []) == ()
    request = make_request(logits_processors_args={"token": 3})
    assert new_sampler([request], "add").sample(logits_of(1), [0]).token_ids == [3]
    with pytest.raises(ConfigError, match="no logits processor 'other'"):
        processors("other")
    with pytest.raises(PluginError, match="cannot be imported"):
        processors("unbuilt")


def test_certain_tokens_are_those_above_the_threshold(make_request, new_sampler):
    """The probability is that of the model's own logits, whatever rule chose the token."""
    logits = logits_of(6)
    early = {"early_stop": {"threshold": 0.3, "window_size": 5}}
    requests = [
        make_request(**early),
        make_request(),
        make_request(**early, temperature=1.5),
        make_request(**early, logit_bias={7: 100.0}),
        make_request(early_stop={"threshold": 0.0}),
        make_request(early_stop={"threshold": 0.9999}),
    ]
    result = new_sampler(requests).sample(logits, range(6))
    probs = logits.softmax(dim=1)[range(6), result.token_ids]
    expected = {row for row in (0, 2, 3) if probs[row] > 0.3} | {4}
    assert set(result.certain) == expected
    logits[0] = torch.nan
    result = new_sampler(requests).sample(logits, range(6))
    assert 0 in result.errors
    assert 0 not in result.certain
    assert new_sampler([make_request()]).sample(logits_of(1), [0]).certain == ()
