"""The checks of logits processors: a good one passes, and for each check a broken one fails."""

import random

import pytest
import torch

from mmdeploy_llm.hooks import LogitsProcessor, LogitsProcessorSpec
from mmdeploy_llm.testing import CheckFailed, CheckSkipped, LogitsExample
from mmdeploy_llm.testing.plugins import logits as checks

EXAMPLE = LogitsExample(
    arguments={"amount": 2.0}, output_token_ids=(1,), logits=(0.0, 0.0), expected=(0.0, 2.0)
)


class Good(LogitsProcessor):
    """Adds `amount` to the logit of the last token."""

    def check(self, arguments):
        if not isinstance(arguments.get("amount", 1.0), float):
            raise ValueError("amount must be a float")

    def apply(self, logits, rows):
        for logit, row in zip(logits, rows, strict=True):
            if row.output_token_ids:
                logit[row.output_token_ids[-1]] += row.arguments.get("amount", 1.0)
        return logits


class TakesAll(Good):
    def check(self, arguments):
        pass


class TakesNothing(Good):
    def check(self, arguments):
        raise ValueError("no")


class WrongError(Good):
    def check(self, arguments):
        if "amount" in arguments and not isinstance(arguments["amount"], float):
            raise ValueError


class WrongShape(Good):
    def apply(self, logits, rows):
        return logits[:, 1:]


class WrongDtype(Good):
    def apply(self, logits, rows):
        return logits.double()


class Raises(Good):
    def apply(self, logits, rows):
        raise OSError("no")


class NotFinite(Good):
    def apply(self, logits, rows):
        return logits / logits.abs().clamp(max=0)


class Mixes(Good):
    def apply(self, logits, rows):
        return logits - logits.mean()


class DependsOnOrder(Good):
    def apply(self, logits, rows):
        logits[0] += 1
        return logits


class Counts(Good):
    def start(self, row):
        return [0]

    def apply(self, logits, rows):
        for logit, row in zip(logits, rows, strict=True):
            row.state[0] += 1
            logit[3] += row.state[0]
        return logits


class Draws(Good):
    def apply(self, logits, rows):
        return logits + random.random()


class Forgets(Good):
    """Knows only the tokens that came after its start."""

    def start(self, row):
        return len(row.output_token_ids)

    def apply(self, logits, rows):
        for logit, row in zip(logits, rows, strict=True):
            logit[list(row.output_token_ids[row.state :])] -= 1
        return logits


class ReadsTheFirstArguments(Good):
    """Adds what the first request of the batch asks for."""

    def apply(self, logits, rows):
        for logit, row in zip(logits, rows, strict=True):
            if row.output_token_ids:
                logit[row.output_token_ids[-1]] += rows[0].arguments.get("amount", 1.0)
        return logits


class KeepsTheFirstState(Good):
    """Adds to the row what the state of the first one says, which depends on arguments only."""

    def start(self, row):
        return row.arguments.get("amount", 1.0)

    def apply(self, logits, rows):
        return logits + torch.tensor([rows[0].state])


class FollowsTheFirst(Good):
    """Adds to the state of each row the tokens that the first one has got meanwhile."""

    def start(self, row):
        return list(row.output_token_ids)

    def apply(self, logits, rows):
        for logit, row in zip(logits, rows, strict=True):
            row.state += rows[0].output_token_ids[len(row.state) :]
            if row.state:
                logit[row.state[-1]] += 1.0
        return logits


class BansForAll(Good):
    """Acts on texts that repeat themselves only, and then on all rows."""

    def apply(self, logits, rows):
        for row in rows:
            tokens = list(row.output_token_ids)
            if len(tokens) >= 6 and tokens[-3:] == tokens[-6:-3]:
                logits[:, tokens[-1]] = -torch.inf
        return logits


class WritesTokens(Good):
    def apply(self, logits, rows):
        for row in rows:
            row.prompt_token_ids[:] = row.prompt_token_ids[-3:]
        return logits


class Remembers(Good):
    """Bans what another request has said."""

    def start(self, row):
        self.said = getattr(self, "said", set()) | {len(row.prompt_token_ids)}
        return frozenset(self.said)

    def apply(self, logits, rows):
        for logit, row in zip(logits, rows, strict=True):
            logit[list(row.state)] -= 1
        return logits


class Idle(Good):
    def apply(self, logits, rows):
        return logits


class NotOne:
    def __init__(self, context):
        pass


def subject(cls, **fields):
    spec = LogitsProcessorSpec(
        name="acme", factory=f"{__name__}:{cls.__name__}", arguments=("amount",)
    )
    given = {"arguments": ({}, {"amount": 2.0}), "wrong_arguments": ({"amount": "much"},)}
    return checks.LogitsProcessorSubject(
        spec=fields.pop("spec", spec), **{**given, "examples": (EXAMPLE,), **fields}
    )


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Lets the specs name classes of this file."""
    import sys
    from types import ModuleType

    module = ModuleType(__name__)
    vars(module).update(globals())
    monkeypatch.setitem(sys.modules, __name__, module)


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_a_good_one_passes(check):
    check(subject(Good))


@pytest.mark.parametrize(
    ("check", "cls", "message"),
    [
        (checks.builds_and_checks_its_arguments, TakesAll, "raise ValueError saying what"),
        (checks.builds_and_checks_its_arguments, TakesNothing, "accept the arguments"),
        (checks.builds_and_checks_its_arguments, WrongError, "without a message"),
        (checks.builds_and_checks_its_arguments, NotOne, "derive it from"),
        (checks.logits_keep_their_form, WrongShape, r"float32 \(10, 299\)"),
        (checks.logits_keep_their_form, WrongDtype, r"float64 \(10, 300\)"),
        (checks.logits_keep_their_form, Raises, "raised OSError: no"),
        (checks.logits_keep_their_form, NotFinite, "ban a token with -inf"),
        (checks.rows_do_not_influence_each_other, Mixes, "its own logits and LogitsRow only"),
        (checks.rows_do_not_influence_each_other, DependsOnOrder, "its own logits"),
        (checks.applying_twice_is_the_same, Counts, "without counting calls or drawing"),
        (checks.applying_twice_is_the_same, Draws, "without counting calls or drawing"),
        (checks.a_request_can_start_again, Forgets, "build the state from both token lists"),
        (checks.rows_do_not_influence_each_other, BansForAll, "its own logits and LogitsRow only"),
        (checks.rows_are_left_as_they_are, WritesTokens, "apply changed a LogitsRow from"),
        (checks.requests_leave_nothing, Remembers, "after the processor has served other requ"),
        (checks.examples_hold, DependsOnOrder, "correct the processor or the example"),
    ],
)
def test_a_broken_one_fails(check, cls, message):
    with pytest.raises(CheckFailed, match=message):
        check(subject(cls))


ROWS = [
    # A bug, and whether it was found before by what the author gives, one set of arguments.
    (ReadsTheFirstArguments, False),
    (KeepsTheFirstState, False),
    (FollowsTheFirst, True),
]


@pytest.mark.parametrize(("cls", "was_found"), ROWS)
def test_rows_that_read_the_first_row_are_found(cls, was_found):
    """One set of arguments is enough: others that the processor accepts are tried beside it."""
    one = subject(cls, arguments=({"amount": 2.0},), examples=())
    with pytest.raises(CheckFailed, match="from its own LogitsRow, not from the first one's"):
        checks.each_row_has_its_own_state(one)
    found = set()
    for check in checks.CHECKS:
        try:
            check(one)
        except CheckFailed:
            found.add(check.__name__)
        except CheckSkipped:
            pass
    assert (found > {"each_row_has_its_own_state"}) == was_found


def test_other_arguments_are_made_of_those_given():
    given = ({"amount": 2.0},)
    one = subject(Good, arguments=given)
    assert one.varied(one.new()) == [{"amount": 2.0}, {"amount": 1.0}, {"amount": 2.5}]
    others = list(checks._others({"7": [1, 2]}))
    assert others == [{"7": [1]}, {"7": [1, 3]}, {"7": [1, 1]}]
    assert list(checks._others(True)) == [False]


def test_an_argument_that_is_not_declared():
    spec = LogitsProcessorSpec(name="acme", factory=f"{__name__}:Good")
    with pytest.raises(CheckFailed, match=r"'amount'.* are not among the spec's `arguments`"):
        checks.arguments_are_declared(subject(Good, spec=spec))


def test_what_is_missing_is_skipped():
    with pytest.raises(CheckSkipped, match="add outputs on which it acts to `texts`"):
        checks.it_is_active(subject(Idle))
    with pytest.raises(CheckSkipped, match="no examples"):
        checks.examples_hold(subject(Good, examples=()))
    with pytest.raises(CheckSkipped, match="give some in `arguments`"):
        checks.logits_keep_their_form(subject(Good, arguments=({"amount": "much"},)))
    assert torch.is_tensor(next(checks._some_logits(2)))
