"""Cuts: files of a corpus format cut off at chosen places, of which each loss must be told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from mmdeploy_llm.testing.models.base import demand

from .corpus_subject import CorpusSubject, Values

TOLD = (
    "raise an exception where the file ends before its content does, or yield a DamagedRow; only a "
    "file that ends between two rows looks whole"
)
BLANK = b"\0 \t\r\n\f\v"  # what stands between rows
STEPS = (1, 2, 3, 7)  # bytes after a row at which the next one is cut within its header


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The result of reading a file that was cut off. rows: those that came. is_told: whether
    something says that the file is damaged."""

    rows: Sequence[Values]
    is_told: bool


class Cuts:
    """The readings of one file cut at its places, each of them made once."""

    def __init__(self, subject: CorpusSubject, name: str, content: bytes) -> None:
        self._subject, self._name, self._content = subject, name, content
        self._whole = subject.good(name, content)
        self._found: dict[int, Cut] = {}
        # Numbers of bytes and other binary content have such bytes, lines of text have not.
        self._is_text = not any(byte < 9 for byte in content)

    def check(self, at: int) -> None:
        """Demands that rows of the file cut at a byte are the file's, and that a loss is told."""
        cut, whole = self._read(at), self._whole
        where = f"{self._name}, cut at byte {at}"
        # The last row of a file of text may be a shorter one, and so may one that is a whole file.
        may_be_shorter = not cut.is_told and (self._is_text or len(cut.rows) == len(whole))
        equal = len(cut.rows) - may_be_shorter
        for number, (row, own) in enumerate(zip(cut.rows[:equal], whole, strict=False), 1):
            demand(
                row == own,
                f"{where}: row {number} is {dict(row)!r:.100}, not {dict(own)!r:.100}; yield no "
                "row before all of it has been read",
            )
        demand(equal <= len(whole), f"{where}: it has {len(cut.rows)} rows, whole {len(whole)}")
        demand(
            not self._is_silent(at) or self._is_between_rows(at),
            f"{where}: {len(cut.rows)} of {len(whole)} rows came, and nothing said that others are "
            f"missing; {TOLD}",
        )

    def after_rows(self, places: Sequence[int]) -> list[int]:
        """Returns places a few bytes after the beginning, and after rows: in the header of the next
        one."""
        found = [step for step in STEPS if step < len(self._content)]
        for low, high in pairwise(places):
            count = self._num_rows(low)
            if self._num_rows(high) > count:
                while high - low > 1:
                    middle = (low + high) // 2
                    if self._num_rows(middle) > count:
                        high = middle
                    else:
                        low = middle
                found += [high + step for step in STEPS if high + step < len(self._content)]
        return found

    def _num_rows(self, at: int) -> int:
        return len(self._read(at).rows)

    def _is_silent(self, at: int) -> bool:
        """Whether whole rows are missing, and nothing says so."""
        cut = self._read(at)
        is_beginning = list(cut.rows) == self._whole[: len(cut.rows)]
        return not cut.is_told and is_beginning and len(cut.rows) < len(self._whole)

    def _is_between_rows(self, at: int) -> bool:
        """Whether a silent cut leaves nothing of a row: what stands before it, but for what
        separates rows, belongs to the last row, so that a cut before that is another one."""
        kept, count = self._content[:at].rstrip(BLANK), self._num_rows(at)
        _, line_end, line = self._content[:at].rpartition(b"\n")
        if self._is_text and (line.lstrip().startswith(b"#") or not (count or line_end)):
            return True  # in a comment, or in the first line, which may hold a table's names
        # A text may do without the last sign of a row, such as a bracket or a full stop.
        checked = range(len(kept) - (2 if self._is_text else 1), len(kept))
        return not all(
            place >= 0 and self._is_silent(place) and self._num_rows(place) == count
            for place in checked
        )

    def _read(self, at: int) -> Cut:
        if at not in self._found:
            what = f"{self._name}, cut at byte {at},"
            rows, error = self._subject.read(what, self._content[:at])
            good = [row for row in rows if row is not None]
            self._found[at] = Cut(rows=good, is_told=error is not None or len(good) < len(rows))
        return self._found[at]
