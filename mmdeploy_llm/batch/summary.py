"""Sums a batch up, and says what its input and its output do not have in common."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdeploy_llm.data.files.skipped import Skipped
from mmdeploy_llm.data.outputs.base import RecordSink, Sink
from mmdeploy_llm.data.outputs.sidecars.writer import SidecarCounts
from mmdeploy_llm.values.outputs.forms import table_of, told
from mmdeploy_llm.values.text.display import duration

from .run import Ending, RunCounts, in_numbers

if TYPE_CHECKING:
    from mmdeploy_llm.data.outputs.scan import RecordIndex
    from mmdeploy_llm.data.records.record import Record

    from .settings import BatchJob

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BatchSummary:
    """The outcome of a batch.

    ending: "done", "max_failures" or "interrupted".
    run: counts of this run.
    num_before: items that earlier runs completed.
    failures: failed items of this and earlier runs, counted by code and class.
    outcomes: all items of this and earlier runs, counted by outcome, see data/records/outcome.py.
    lacks: those that are neither failed nor ok, counted by outcome with its reason.
    num_again: items of this run that had a record, and whose input has changed since.
    num_left: items without a record; None when the size of the input is unknown.
    disagreements: of a run that is done, what its input and its output do not have in common, in
        words; then some items are left.
    skipped: what of the input was not read. num_gone: records whose files, or pages of these, are
        gone, and which stay in the output; num_pruned: those that were removed from it.
    unit: the noun for one item.
    sidecars: what became of the texts beside pictures; None when there were to be none.
    sink, index: the output, and the positions of the records in it.
    """

    sink: Sink
    ending: Ending
    run: RunCounts
    num_before: int
    failures: Mapping[str, int]
    outcomes: Mapping[str, int]
    lacks: Mapping[str, int]
    num_left: int | None
    index: RecordIndex
    num_again: int = 0
    disagreements: tuple[str, ...] = ()
    skipped: Skipped = field(default_factory=Skipped)
    num_gone: int = 0
    num_pruned: int = 0
    sidecars: SidecarCounts | None = None
    unit: str = "item"

    @property
    def output(self) -> Path:
        """The output: a file, or a folder of parts. The `name` of `sink` has the URL of one that is
        not on this machine."""
        return Path(self.sink.name)

    def records(self, most: int | None = None) -> Iterator[Record]:
        """Yields the records in the order of the input; at most `most`, those that are not ok
        first."""
        return self.sink.records_at(self.index.offsets(most))

    @property
    def num_failed(self) -> int:
        """Items of the batch whose record is an error, those of earlier runs included."""
        return sum(self.failures.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """Says which files were not read, which records have no file any more, and what became of
        boxes and sidecars, in sentences."""
        found = [self.skipped.text] if self.skipped.text else []
        found += self.skipped.notes
        if self.run.num_same:
            found.append(f"{self.run.num_same} asked the same as another item: answered once")
        one, many = ("file or page", "files or pages") if self.unit == "page" else ("file", "files")
        if num := self.index.num_noted:
            records = "record says" if num == 1 else "records say"
            found.append(
                f"{num} {records} what a model did not get of its text or media: media_notes"
            )
        if num := self.num_gone:
            found_of = f"record is of a {one} that is", f"records are of {many} that are"
            it = "it" if num == 1 else "them"
            found.append(f"{num} {found_of[num > 1]} gone (--prune removes {it})")
        if num := self.num_pruned:
            words = f"record of a {one} that was" if num == 1 else f"records of {many} that were"
            found.append(f"removed {num} {words} gone")
        if self.run.boxes is not None:
            found += self.run.boxes.lines()
        if self.sidecars is not None:
            found += self.sidecars.lines()
        return (*found, *self.sink.notes())

    @property
    def num_lacking(self) -> int:
        """Items of the batch that are neither failed nor ok, those of earlier runs included."""
        return sum(self.lacks.values())

    @property
    def num_records(self) -> int:
        """Items of the batch with a record in the output."""
        return len(self.index)

    def _facts(self) -> dict[str, str]:
        run = self.run
        facts = {
            "records": f"{self.num_records:,}, of which "
            + ", ".join(f"{num:,} {outcome}" for outcome, num in self.outcomes.items()),
            "left": "unknown" if self.num_left is None else f"{self.num_left:,}",
            "this run": f"{run.num_items:,} in {duration(run.elapsed)}, "
            f"{run.tokens_per_second:.0f} tokens/s",
            "failures": ", ".join(f"{num} x {kind}" for kind, num in self.failures.items()),
            "notes": "\n".join(self.notes),
        }
        return {name: words for name, words in facts.items() if words}

    def __repr__(self) -> str:
        return told(f"BatchSummary({self.ending!r}, output={self.sink.name!r})", self._facts())

    def _repr_html_(self) -> str:
        facts = {"ending": self.ending, "output": self.sink.name, **self._facts()}
        return table_of("BatchSummary", facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputChange:
    """An input that has another size than when the run began, and was not read to the end."""

    before: int
    now: int
    num_read: int

    @classmethod
    def of(cls, job: BatchJob) -> InputChange | None:
        """Returns the change during a run that is done; None when there is none, or none is known:
        blank lines are counted and not read, so only sizes are compared."""
        before, num_read = job.source.total, job.left.num_met
        try:
            now = job.source.counted()
        except OSError:
            now = None
        if before is None or now is None or now == before or num_read >= max(now, before):
            return None
        return cls(before=before, now=now, num_read=num_read)

    def __str__(self) -> str:
        return (
            f"the input had {self.before} items when the run began and has {self.now} now; "
            f"{self.num_read} were read, and --resume does what it has"
        )


def about(job: BatchJob) -> dict[str, Any]:
    """Returns the values of all events of a run: those that tell several runs apart."""
    chosen = job.settings.selection
    shard = {} if chosen.num_shards == 1 else {"shard": f"{chosen.shard}/{chosen.num_shards}"}
    return {"output": job.sink.name, **shard}


def begun(job: BatchJob) -> dict[str, Any]:
    """Returns the values of the event "started"."""
    return {
        "mode": job.settings.mode,
        "unit": job.source.unit,
        "num_items": job.source.total,
        "num_before": len(job.kept.index),
        "pid": os.getpid(),
        "version": metadata.version("mmdeploy-llm"),
    }


def ended(summary: BatchSummary) -> dict[str, Any]:
    """Returns the values of the event "finished"."""
    return {
        "ending": summary.ending,
        "error": None,
        "num_left": summary.num_left,
        "num_before": summary.num_before,
        "num_skipped": len(summary.skipped),
        "run": {**in_numbers(summary.run), "seconds": round(summary.run.elapsed, 3)},
        "all": dict(summary.outcomes),
        "asked_again": dict(summary.run.asked_again),
        "failures": dict(summary.failures),
        "lacks": dict(summary.lacks),
        "boxes": None if summary.run.boxes is None else asdict(summary.run.boxes),
        "disagreements": list(summary.disagreements),
    }


def summary_of(
    job: BatchJob,
    ending: Ending,
    run: RunCounts,
    num_before: int,
    writer: RecordSink | None,
    change: InputChange | None = None,
    sidecars: SidecarCounts | None = None,
) -> BatchSummary:
    """Returns the summary of a run; logs what does not agree. writer: None when nothing was to be
    written."""
    index = job.kept.index if writer is None else writer.index
    num_again = 0 if writer is None else writer.num_again
    total = job.source.total
    found = _disagreements(job, run, change) if ending == "done" else {}
    num_left = None if total is None else max(0, total - len(index))
    for words in found:
        logger.warning("%s", words)
    return BatchSummary(
        sink=job.sink,
        ending=ending,
        run=run,
        num_before=num_before - num_again,
        failures=dict(index.failures.most_common()),
        outcomes=dict(index.outcomes.most_common()),
        lacks=dict(index.lacks.most_common()),
        num_left=sum(found.values()) if ending == "done" else num_left,
        index=index,
        num_again=num_again,
        disagreements=tuple(found),
        skipped=job.source.skipped,
        sidecars=sidecars,
        unit=job.source.unit,
        **{"num_pruned" if job.settings.finding.prune else "num_gone": len(job.gone)},
    )


def _disagreements(job: BatchJob, run: RunCounts, change: InputChange | None) -> dict[str, int]:
    """Returns what a run that is done has not done, in words, with the number of items."""
    num_given = job.left.num_given
    found: dict[str, int] = {}
    if run.num_items < num_given:
        num = num_given - run.num_items
        found[f"{num} of {num_given} items have no result; --resume does them"] = num
    if not job.left.is_read:
        words = "the run ended before all items of the input were read; --resume does the others"
        found[words] = max(1, (job.source.total or 0) - job.left.num_met)
    elif change is not None:
        found[str(change)] = max(change.before, change.now) - change.num_read
    return found
