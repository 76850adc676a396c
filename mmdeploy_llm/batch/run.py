"""The loop that every batch runs: items -> prompts -> answers -> records, in order of completion.

    source --> left_to_do() --> Answerer.answer_each() --> records --> RecordSink
                    '-- lines that cannot be used ------------^

Only the set of known ids grows with the batch: a prompt is built when the engine has a free slot,
and a record is dropped once it is written.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from mmdeploy_llm.batch.progress.clock import Clock
from mmdeploy_llm.batch.progress.reporter import Tell, silent
from mmdeploy_llm.batch.questions.boxed import BoxCounts
from mmdeploy_llm.batch.questions.gathering import Gathering, asks_of, item_of
from mmdeploy_llm.data.files.duplicates import Duplicates
from mmdeploy_llm.data.outputs.base import RecordSink
from mmdeploy_llm.data.records.ids import DoneItems, IdSet
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.records.making import bad_record
from mmdeploy_llm.data.records.outcome import counted
from mmdeploy_llm.data.records.record import Record, key_of
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.engine.desk.answerer import Answerer
from mmdeploy_llm.engine.desk.ask import Ask
from mmdeploy_llm.engine.desk.outcome import Answer
from mmdeploy_llm.system.processes import interrupted_later
from mmdeploy_llm.values.text.display import duration
from mmdeploy_llm.values.text.progress_bars import UseTqdm, open_bar, show_words

from .sources import Source

BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"

Ending = Literal["done", "max_failures", "interrupted"]
Finish = Callable[[Record, Item | BadItem], Record]


@dataclass(slots=True, kw_only=True)
class RunCounts:
    """Counts of one run; a Tally counts up its own and hands out copies.

    num_done: items with the outcome "ok".
    failures: number of failed items by kind, such as "400 MediaError".
    outcomes: number of other items by outcome: "empty", "repetition", "malformed", "truncated".
    answers: number of answers to each of several questions, by name.
    asked_again: answers that were asked again, by the check that they broke.
    num_same: items whose answer is another one's, see data/files/duplicates.py.
    boxes: what was read of boxes; None where they were not to be read.
    elapsed: seconds, without loading the model.
    """

    num_done: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    asked_again: Counter[str] = field(default_factory=Counter)
    num_same: int = 0
    boxes: BoxCounts | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    elapsed: float = 0.0

    @property
    def num_failed(self) -> int:
        """Items that ended with an error."""
        return self.failures.total()

    @property
    def num_items(self) -> int:
        """Items that finished, whatever their outcome."""
        return self.num_done + self.num_failed + self.outcomes.total()

    @property
    def lacking(self) -> str:
        """Counts what has not ended as it should, in words: "2 failed, 1 empty"."""
        return ", ".join([f"{self.num_failed} failed", *counted(self.outcomes)])

    @property
    def items_per_second(self) -> float:
        """Items that finished, per second."""
        return self.num_items / max(self.elapsed, 1e-9)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second; those of prompts where nothing is generated."""
        return (self.num_output_tokens or self.num_prompt_tokens) / max(self.elapsed, 1e-9)


def in_numbers(counts: RunCounts) -> dict[str, Any]:
    """Returns the counts as values of an event."""
    return {
        "num_done": counts.num_done,
        "num_failed": counts.num_failed,
        "outcomes": dict(counts.outcomes),
        "num_prompt_tokens": counts.num_prompt_tokens,
        "num_output_tokens": counts.num_output_tokens,
    }


def _told(record: Record) -> dict[str, Any]:
    """Returns the values of an event "item"."""
    names = ("id", "line", "outcome", "outcome_reason")
    error = None if record.error is None else record.error.to_json()
    return {**{name: getattr(record, name) for name in names}, "error": error}


class LeftToDo:
    """The items of a source that are not done, or whose input has changed since; a duplicate id
    becomes a BadItem. Iterated once.

    num_met: items that the source has given. num_given: those of them that are left to do.
    is_read: whether the source has given all.
    """

    def __init__(self, source: Source, done: DoneItems) -> None:
        self._source, self._done = source, done
        self.num_met = self.num_given = 0
        self.is_read = False

    def __iter__(self) -> Iterator[Item | BadItem]:
        met = IdSet()
        for item in self._source:
            self.num_met += 1
            if item.id is not None and not met.add(key_of(item.id, item.line)):
                item = BadItem(
                    line=item.line,
                    message=f"the id {str(item.id)[:80]!r} is used by an earlier line; ids must "
                    "differ, and the id of a line without one is its line number",
                )
            if not self._done.has(key_of(item.id, item.line), item.digest):
                self.num_given += 1
                yield item
        self.is_read = True


class Watch(Protocol):
    """Sees every record of a run as soon as it is written."""

    def begin(self, tally: Tally) -> None:
        """The run begins; `tally` says at any time how far it is."""

    def take(self, record: Record, item: Item | BadItem) -> None:
        """An item has finished, and its media are still there. Must return at once."""


class BatchRun:
    """One run over items; used once. Locks its state, because an engine may pull prompts in
    another thread than the one that iterates its answers.

    config_digest: of the configuration, for the records. is_json: see Gathering. duplicates: finds
    items that ask the same; None: each is asked. finish: makes of a record what is written.
    """

    def __init__(
        self,
        items: Iterable[Item | BadItem],
        writer: RecordSink,
        *,
        tally: Tally,
        max_failures: int | None = None,
        config_digest: str = "",
        duplicates: Duplicates | None = None,
        watch: Watch | None = None,
        is_json: bool = False,
        finish: Finish | None = None,
    ) -> None:
        self._finish = finish
        self._items, self._duplicates = items, duplicates
        self._gathering = Gathering(config_digest, is_json=is_json)
        self._writer = writer
        self._tally = tally
        self._max_failures = max_failures
        self._watch = watch
        self._lock = threading.Lock()
        self._is_over = False

    def run(self, llm: Answerer) -> Ending:
        """Answers every item and writes each record as soon as the item finishes.

        Ends early at `max_failures` and on Ctrl-C: written records stay, unfinished items are
        dropped.
        """
        try:
            with closing(llm.answer_each(self._asks())) as answers:
                for answer in answers:
                    self._collect(answer)
                    if self._is_over:
                        return "max_failures"
        except KeyboardInterrupt:
            return "interrupted"
        return "max_failures" if self._is_over else "done"

    def _asks(self) -> Iterator[Ask]:
        """Yields prompts on demand; records lines that cannot be used at once."""
        for item in self._items:
            size = item.size if isinstance(item, Item) else None
            self._tally.clock.begin(key_of(item.id, item.line), size)
            if isinstance(item, BadItem):
                self._take(bad_record(item), item)
            elif not self._is_same(item):
                yield from asks_of(item)
            if self._is_over:
                return

    def _is_same(self, item: Item) -> bool:
        """Whether another item has or gets the answer; it is written when it is there."""
        found = self._duplicates is not None and self._duplicates.met(item)
        if isinstance(found, Record):
            self._take(found, item)
        return found is not False

    def _collect(self, answer: Answer) -> None:
        """Writes the record of an item that has finished."""
        item, record = item_of(answer.ask), self._gathering.add(answer)
        if record is None:
            return
        others: list[tuple[Item, Record]] = []
        if self._duplicates is not None:
            record, others = self._duplicates.answered(item, record)
        self._take(record, item)
        for other, copy in others:
            self._take(copy, other)

    def _take(self, record: Record, item: Item | BadItem) -> None:
        record = record if self._finish is None else self._finish(record, item)
        # Ctrl-C waits until what is written is counted too.
        with self._lock, interrupted_later():
            is_first = self._writer.write(record, item.line, item)
            self._tally.count(record, is_first=is_first)
            if self._watch is not None:
                self._watch.take(record, item)
            most = self._max_failures
            if most is not None and self._tally.num_failed >= most:
                self._is_over = True


class Tally:
    """Counts a run's items, shows its progress bar on stderr, and tells each item that has not its
    answer. Updated by BatchRun only.

    clock: says how far the run is, for all who show it.
    num_before: items that earlier runs completed. mean_size: of all items, see Source.
    use_tqdm: see open_bar.
    """

    def __init__(
        self,
        *,
        unit: str,
        total: int | None,
        num_before: int = 0,
        mean_size: float | None = None,
        use_tqdm: UseTqdm | None = None,
        tell: Tell = silent,
    ) -> None:
        self._tell = tell
        self.clock = Clock(total, num_before, mean_size)
        self._unit = unit
        self._counts = RunCounts()
        self._bar = open_bar(
            use_tqdm, total=total, initial=num_before, desc="Batch", bar_format=BAR
        )

    @property
    def num_failed(self) -> int:
        """Items that have failed so far."""
        return self._counts.num_failed

    def count(self, record: Record, *, is_first: bool = True) -> None:
        """Counts one record. is_first: advances the progress bar; it has counted an earlier
        record of the item already."""
        counts = self._counts
        if not record.is_ok:
            counts.failures[record.failure] += 1
        elif record.outcome == "ok":
            counts.num_done += 1
        else:
            counts.outcomes[record.outcome] += 1
        counts.answers.update(record.answers.keys())
        counts.num_same += record.same_as is not None
        counts.num_prompt_tokens += record.num_prompt_tokens
        counts.num_output_tokens += record.num_output_tokens
        if record.outcome != "ok":
            self._tell("item", **_told(record))
        self.clock.end(record.key, is_new=is_first)
        show_words(self._bar, self._words())
        self._bar.update(int(is_first))

    def _words(self) -> str:
        """Returns what stands after the bar."""
        moment, counts = self.clock.moment(), self._counts
        counts.elapsed = moment.elapsed
        left = moment.seconds_left
        return ", ".join(
            (
                *([] if left is None else [f"{duration(left)} left"]),
                f"{moment.per_second:.1f} {self._unit}s/s",
                f"{counts.tokens_per_second:.0f} tokens/s",
                counts.lacking,
            )
        )

    def progress(self) -> dict[str, Any]:
        """Returns the values of an event "progress", see progress/; called by another thread."""
        moment, counts = self.clock.moment(), self.counts()
        left = moment.seconds_left
        return {
            **in_numbers(counts),
            "unit": self._unit,
            "num_left": moment.num_left,
            "items_per_second": round(moment.per_second, 4),
            "tokens_per_second": round(counts.tokens_per_second, 2),
            "seconds_left": None if left is None else round(left, 1),
        }

    def counts(self) -> RunCounts:
        """Returns the counts so far."""
        own, elapsed = self._counts, self.clock.moment().elapsed
        return replace(
            own,
            elapsed=elapsed,
            failures=Counter(own.failures),
            outcomes=Counter(own.outcomes),
            answers=Counter(own.answers),
        )

    def close(self) -> None:
        """Closes the progress bar."""
        self._bar.close()
