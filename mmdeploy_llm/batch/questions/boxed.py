"""Boxed: an Answerer that reads the boxes in the answers of another one."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mmdeploy_llm.data.records.boxes import values_of
from mmdeploy_llm.engine.desk.outcome import Answer
from mmdeploy_llm.errors import MMDeployLLMError

if TYPE_CHECKING:
    from mmdeploy_llm.data.records.record import Record
    from mmdeploy_llm.engine.desk.answerer import Answerer, LoadedModel
    from mmdeploy_llm.engine.desk.ask import Ask
    from mmdeploy_llm.media.boxes.reading import FoundBoxes

MAX_BOXES = 1000  # of one answer that a record has
MAX_SHOWN = 200  # characters of an error


@dataclass(slots=True, kw_only=True)
class BoxCounts:
    """Counts boxes in answers; written by Boxed.

    num_boxes: in records. num_with, num_without: answers with and without any.
    num_unread: boxes that were half-written or without an area. num_cut: boxes that were more than
    MAX_BOXES of their answer. num_failed: answers whose picture has no size, or is not the only
    one; fault: why, of the first.
    """

    num_boxes: int = 0
    num_with: int = 0
    num_without: int = 0
    num_unread: int = 0
    num_cut: int = 0
    num_failed: int = 0
    fault: str = ""

    def lines(self) -> list[str]:
        """Returns what a summary says."""
        found = [f"{self.num_boxes} boxes in {self.num_with} answers, {self.num_without} have none"]
        if self.num_unread:
            found.append(f"{self.num_unread} boxes could not be read: half-written, or no area")
        if self.num_cut:
            found.append(f"{self.num_cut} boxes left out: a record has {MAX_BOXES} of an answer")
        if self.num_failed:
            found.append(f"boxes of {self.num_failed} answers were not read: {self.fault}")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxedAnswer(Answer):
    """An answer whose text may have boxes. found: None where they could not be read."""

    found: FoundBoxes | None = None


class Boxed:
    """An Answerer that reads the boxes in the first sample of each answer that has not failed. Used
    by one call. llm: has the rule of the model."""

    def __init__(self, llm: LoadedModel, inner: Answerer) -> None:
        self._llm, self.inner = llm, inner
        self.counts = BoxCounts()

    def answer_each(self, asks: Iterable[Ask]) -> Generator[Answer, None, None]:
        """Yields the answers as they finish."""
        with closing(self.inner.answer_each(asks)) as answers:
            for answer in answers:
                yield self._read(answer) if answer.output.is_ok else answer

    def _read(self, answer: Answer) -> Answer:
        counts, found = self.counts, None
        try:
            found = self._llm.find_boxes(answer.ask.prompt, answer.output.outputs[0].text)
        except MMDeployLLMError as error:
            counts.num_failed += 1
            counts.fault = counts.fault or str(error)[:MAX_SHOWN]
        if found is not None:
            counts.num_unread += found.num_unread
            counts.num_cut += max(0, len(found.boxes) - MAX_BOXES)
            found = replace(found, boxes=found.boxes[:MAX_BOXES])
            counts.num_boxes += len(found.boxes)
            counts.num_with += bool(found.boxes)
            counts.num_without += not found.boxes
        return BoxedAnswer(ask=answer.ask, output=answer.output, error=answer.error, found=found)


def with_boxes(record: Record, answer: Answer) -> Record:
    """Returns the record of an answer with the boxes that were read in it."""
    if not isinstance(answer, BoxedAnswer) or answer.found is None:
        return record
    boxes, size = values_of(answer.found.boxes), answer.found.size
    return replace(record, boxes=boxes, picture_size=size)
