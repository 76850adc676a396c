"""Checks of a logits processor."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.hooks import LogitsContext, LogitsProcessor, LogitsProcessorSpec, LogitsRow
from mmdeploy_llm.testing.models.base import (
    Check,
    CheckSkipped,
    attributed,
    demand,
    factory_of,
    since,
)

VOCAB_SIZE = 300
NUM_STEPS = 12  # tokens of each generated request
MAX_STEPS = 40  # tokens of a request that follows an author's text


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsExample:
    """The logits `expected` for `logits`, both one number for each token of a small vocabulary."""

    logits: Sequence[float]
    expected: Sequence[float]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class LogitsProcessorSubject:
    """A processor to check, and its author's arguments and examples.

    arguments: some that it accepts. wrong_arguments: some that it refuses.
    texts: outputs on which the processor is active, as texts or token ids below VOCAB_SIZE.
    new_tokenizer: returns a tokenizer for the processor's context.
    """

    spec: LogitsProcessorSpec
    arguments: Sequence[Mapping[str, Any]] = ({},)
    wrong_arguments: Sequence[Mapping[str, Any]] = ()
    examples: Sequence[LogitsExample] = ()
    texts: Sequence[str | Sequence[int]] = ()
    new_tokenizer: Callable[[], Any] = lambda: None

    def new(self, vocab_size: int = VOCAB_SIZE) -> LogitsProcessor:
        """Builds a processor for an engine."""
        context = LogitsContext(
            vocab_size=vocab_size, tokenizer=self.new_tokenizer(), eos_token_ids=frozenset({0})
        )
        factory = factory_of(self.spec)
        with attributed(f"{self.spec.factory}(context)", "accept a LogitsContext"):
            processor = factory(context)
        demand(
            isinstance(processor, LogitsProcessor),
            f"{self.spec.factory}(context) returns a {type(processor).__name__}; derive it from "
            "mmdeploy_llm.hooks.LogitsProcessor",
        )
        return processor  # type: ignore[no-any-return]

    @cached_property
    def usable(self) -> tuple[Mapping[str, Any], ...]:
        """The arguments that the processor accepts."""
        processor, found = self.new(), []
        for arguments in self.arguments:
            try:
                processor.check(arguments)
            except (ValueError, TypeError):
                continue
            found.append(arguments)
        if not found:
            raise CheckSkipped("it needs arguments; give some in `arguments`")
        return tuple(found)

    def varied(self, processor: LogitsProcessor) -> list[Mapping[str, Any]]:
        """Returns the usable arguments and others like them that the processor accepts, none twice:
        each value changed, so that the requests of a batch ask for different things."""
        found = list(self.usable)
        for arguments in self.usable:
            for name, value in arguments.items():
                for other in _others(value):
                    changed = {**arguments, name: other}
                    try:
                        processor.check(changed)
                    except (ValueError, TypeError):
                        continue
                    found += [changed] * (changed not in found)
        return found

    def rows(self, processor: LogitsProcessor, num_outputs: int = NUM_STEPS) -> list[LogitsRow]:
        """Returns requests that have just started, all different: random ones of two lengths for
        each arguments, and with outputs, those of `texts` and of the examples, and a text that
        repeats itself."""
        rng = random.Random(1)
        outputs: list[tuple[Mapping[str, Any], Sequence[int] | None]] = [
            (each, None) for each in (*self.usable, *self.usable)
        ]
        outputs += [(each, text) for each in self.usable for text in self._active()[:num_outputs]]
        rows = []
        for arguments, text in outputs:
            drawn = [rng.randrange(20) for _ in range(rng.randint(0, num_outputs))]
            row = LogitsRow(
                arguments=arguments,
                prompt_token_ids=[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))],
                output_token_ids=drawn if text is None else list(text),
            )
            self.begin(processor, row)
            rows.append(row)
        return rows

    def _active(self) -> list[Sequence[int]]:
        """Returns outputs on which a processor may be active."""
        given = (*self.texts, *(example.output_token_ids for example in self.examples))
        found: list[Sequence[int]] = [[7, 8, 9] * 6, [5] * 9]
        for text in given:
            if isinstance(text, str):
                text = self.new_tokenizer()(text, add_special_tokens=False)["input_ids"]
            if text:
                found.append([token % VOCAB_SIZE for token in text])
        return found

    def begin(self, processor: LogitsProcessor, row: LogitsRow) -> None:
        """Sets the row's state."""
        with attributed(f"start({row!r})", "`check` must refuse arguments that do not work"):
            row.state = processor.start(row)

    def apply(
        self, processor: LogitsProcessor, logits: Tensor, rows: Sequence[LogitsRow]
    ) -> Tensor:
        """Returns what the processor makes of a copy of the logits."""
        with attributed(f"apply(logits {tuple(logits.shape)}, rows)", "accept any logits"):
            found = processor.apply(logits.clone(), rows)
        demand(
            isinstance(found, Tensor)
            and found.shape == logits.shape
            and found.dtype == logits.dtype,
            f"apply returns {_shown(found)} for float32 logits {tuple(logits.shape)}; return a "
            "tensor of the same shape and dtype",
        )
        return found


def builds_and_checks_its_arguments(subject: LogitsProcessorSubject) -> None:
    """The factory accepts a context; good arguments are accepted, wrong ones raise ValueError."""
    processor = subject.new()
    for arguments in subject.arguments if subject.wrong_arguments or subject.examples else ():
        with attributed(f"check({arguments!r})", "accept the arguments, or remove them"):
            processor.check(arguments)
    for arguments in subject.wrong_arguments:
        try:
            processor.check(arguments)
        except ValueError as error:
            demand(str(error), f"check({arguments!r}) raises an error without a message")
            continue
        demand(False, f"check({arguments!r}) accepts them; raise ValueError saying what is allowed")


def arguments_are_declared(subject: LogitsProcessorSubject) -> None:
    """Every argument that is used is in the spec's `arguments`; others never reach it."""
    for arguments in subject.usable:
        unknown = sorted(set(arguments) - set(subject.spec.arguments))
        demand(not unknown, f"{unknown} are not among the spec's `arguments`; add them")


def logits_keep_their_form(subject: LogitsProcessorSubject) -> None:
    """The result has the shape and dtype of the logits, and is neither NaN nor +inf."""
    processor = subject.new()
    rows = subject.rows(processor)
    for logits in _some_logits(len(rows)):
        found = subject.apply(processor, logits, rows)
        is_wrong = found.isnan() | (found == torch.inf)
        demand(
            not is_wrong.any(),
            "apply returns NaN or +inf for logits that were finite or -inf; ban a token with -inf",
        )


def rows_do_not_influence_each_other(subject: LogitsProcessorSubject) -> None:
    """A request gets the same logits alone as in a batch, in any order."""
    processor = subject.new()
    rows = subject.rows(processor)
    for logits in _some_logits(len(rows)):
        whole = subject.apply(processor, logits, rows)
        turned = subject.apply(processor, logits.flip(0), rows[::-1]).flip(0)
        alone = torch.cat(
            [
                subject.apply(processor, logits[index : index + 1], [row])
                for index, row in enumerate(rows)
            ]
        )
        demand(
            torch.equal(whole, alone) and torch.equal(whole, turned),
            "apply returns other logits for a request in a batch than for the same request alone; "
            "compute each row from its own logits and LogitsRow only",
        )


def applying_twice_is_the_same(subject: LogitsProcessorSubject) -> None:
    """`apply` changes no state: a step that failed is computed again."""
    processor = subject.new()
    rows = subject.rows(processor)
    for logits in _some_logits(len(rows)):
        first, second = (subject.apply(processor, logits, rows) for _ in range(2))
        demand(
            torch.equal(first, second),
            "apply returns other logits when it is called again for the same tokens; derive "
            "everything from the tokens in the LogitsRow, without counting calls or drawing",
        )


def a_request_can_start_again(subject: LogitsProcessorSubject) -> None:
    """A request that was interrupted continues as if it had not been (preemption)."""
    processor, other = subject.new(), subject.new()
    rng = random.Random(2)
    rows = subject.rows(processor, num_outputs=0)
    for _ in range(NUM_STEPS):
        again = [
            LogitsRow(
                arguments=row.arguments,
                prompt_token_ids=row.prompt_token_ids,
                output_token_ids=list(row.output_token_ids),
            )
            for row in rows
        ]
        for row in again:
            subject.begin(other, row)
        for logits in _some_logits(len(rows)):
            demand(
                torch.equal(
                    subject.apply(processor, logits, rows), subject.apply(other, logits, again)
                ),
                "a request that starts with some output gets other logits than one that generated "
                "the same tokens without interruption; build the state from both token lists",
            )
        for row in rows:
            tokens = row.output_token_ids
            assert isinstance(tokens, list)
            tokens.append(rng.randrange(20))


def it_is_active(subject: LogitsProcessorSubject) -> None:
    """Some text makes the processor change some logit, so that the other checks see it at work."""
    processor = subject.new()
    rows = subject.rows(processor)
    for logits in _some_logits(len(rows)):
        if not torch.equal(subject.apply(processor, logits, rows), logits):
            return
    raise CheckSkipped(
        "it changed no logit after any text that was tried; add outputs on which it acts to `texts`"
    )


def rows_are_left_as_they_are(subject: LogitsProcessorSubject) -> None:
    """`apply` changes neither the tokens nor the arguments of a request."""
    processor = subject.new()
    rows = subject.rows(processor)
    before = [_told(row) for row in rows]
    for logits in _some_logits(len(rows)):
        subject.apply(processor, logits, rows)
        for row, told in zip(rows, before, strict=True):
            demand(
                _told(row) == told,
                f"apply changed a LogitsRow from {told!r:.200} to {_told(row)!r:.200}; keep what "
                "you need in the state that `start` returns",
            )


def requests_leave_nothing(subject: LogitsProcessorSubject) -> None:
    """A request gets the same logits whatever requests the processor served before."""
    used, new = subject.new(), subject.new()
    earlier = subject.rows(used)
    for logits in _some_logits(len(earlier)):
        subject.apply(used, logits, earlier)
    rows, same = (subject.rows(processor)[::-1] for processor in (used, new))
    for logits in _some_logits(len(rows)):
        demand(
            torch.equal(subject.apply(used, logits, rows), subject.apply(new, logits, same)),
            "apply returns other logits after the processor has served other requests; keep the "
            "state of a request in what `start` returns, not in `self`, and forget the rest",
        )


@since(1, 2)
def each_row_has_its_own_state(subject: LogitsProcessorSubject) -> None:
    """Requests with different arguments, which grow in one batch, get the logits that each gets
    alone."""
    processor, other = subject.new(), subject.new()
    rng = random.Random(3)
    texts = subject._active()
    batch: list[LogitsRow] = []
    growing: list[Iterator[int]] = []
    for number, arguments in enumerate(subject.varied(processor) * 2):
        # Of two requests with the same arguments one repeats a text, one says anything.
        text = texts[number % len(texts)] if number % 2 else rng.choices(range(20), k=NUM_STEPS)
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(1 + number % 7)]
        row = LogitsRow(arguments=arguments, prompt_token_ids=prompt, output_token_ids=[])
        subject.begin(processor, row)
        batch.append(row)
        growing.append(iter(text))
    for _ in range(MAX_STEPS):
        logits = next(_some_logits(len(batch)))
        found = subject.apply(processor, logits, batch)
        for row, given, one in zip(batch, logits, found, strict=True):
            _demand_alone(subject, other, row, given, one)
        grown = [next(tokens, None) for tokens in growing]
        for row, token in zip(batch, grown, strict=True):
            assert isinstance(row.output_token_ids, list)
            row.output_token_ids += [] if token is None else [token]
        if not any(token is not None for token in grown):
            return


def _demand_alone(
    subject: LogitsProcessorSubject,
    other: LogitsProcessor,
    row: LogitsRow,
    given: Tensor,
    one: Tensor,
) -> None:
    """Fails unless a request that starts anew and alone gets the logits that it got in a batch."""
    again = LogitsRow(
        arguments=row.arguments,
        prompt_token_ids=row.prompt_token_ids,
        output_token_ids=list(row.output_token_ids),
    )
    subject.begin(other, again)
    (alone,) = subject.apply(other, given[None], [again])
    demand(
        torch.equal(alone, one),
        f"a request with arguments {dict(row.arguments)!r:.200} gets other logits in a batch of "
        "requests with other arguments than alone; read the arguments, the tokens and the state of "
        "each row from its own LogitsRow, not from the first one's",
    )


def _others(value: Any) -> Iterator[Any]:
    """Yields values of the type of an argument that differ from it, most of which are allowed."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value - 1)
    elif isinstance(value, float):
        yield from (value / 2, value + 0.5)
    elif isinstance(value, (list, tuple)) and value:
        yield value[:-1]
        for other in _others(value[-1]):
            yield type(value)((*value[:-1], other))
    elif isinstance(value, Mapping) and value:
        key, last = list(value.items())[-1]
        for other in _others(last):
            yield {**value, key: other}


def _told(row: LogitsRow) -> tuple[Any, ...]:
    return dict(row.arguments), list(row.prompt_token_ids), list(row.output_token_ids)


def examples_hold(subject: LogitsProcessorSubject) -> None:
    """The author's examples hold."""
    if not subject.examples:
        raise CheckSkipped("no examples were given; add some to `examples`")
    for example in subject.examples:
        processor = subject.new(len(example.logits))
        row = LogitsRow(
            arguments=example.arguments,
            prompt_token_ids=list(example.prompt_token_ids),
            output_token_ids=list(example.output_token_ids),
        )
        subject.begin(processor, row)
        (found,) = subject.apply(processor, torch.tensor([list(example.logits)]), [row])
        expected = torch.tensor(list(example.expected))
        demand(
            torch.allclose(found, expected, rtol=1e-5, atol=1e-6),
            f"{list(example.logits)} with {dict(example.arguments)} becomes {found.tolist()}, but "
            f"the example says {expected.tolist()}; correct the processor or the example",
        )


CHECKS: tuple[Check, ...] = (
    builds_and_checks_its_arguments,
    arguments_are_declared,
    logits_keep_their_form,
    rows_do_not_influence_each_other,
    applying_twice_is_the_same,
    a_request_can_start_again,
    it_is_active,
    each_row_has_its_own_state,
    rows_are_left_as_they_are,
    requests_leave_nothing,
    examples_hold,
)


def _some_logits(num_rows: int) -> Iterator[Tensor]:
    """Yields float32 logits: random ones, all equal ones, and some where most tokens are banned."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=generator) * 5
    yield logits
    yield torch.zeros(num_rows, VOCAB_SIZE)
    yield logits.masked_fill(logits < 3, -torch.inf)


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return f"a {type(value).__name__}"
