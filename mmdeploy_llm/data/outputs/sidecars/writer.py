"""Sidecars: the text files that a run writes beside the pictures of its input."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from mmdeploy_llm.data.records.files import Folder
from mmdeploy_llm.data.records.ids import IdSet
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.rows.names import BUILT_IN_KINDS
from mmdeploy_llm.errors import ConfigError, RequestError
from mmdeploy_llm.hooks import KindTable
from mmdeploy_llm.values.closing import Closing

from .options import SidecarOptions, check_suffix
from .places import BYTE_ORDER_MARK, Places, Spot, is_read_only, text_in
from .text import has_several_lines

JOINED = "of several lines became one line: trainers read the first line only"
NO_ANSWER = frozenset(("failed", "empty", "repetition", "malformed"))  # outcomes without a sidecar


@dataclass(slots=True, kw_only=True)
class SidecarCounts:
    """Counts what became of the sidecars of a run; filled by Sidecars.

    num_written: new, replaced and extended ones. num_kept: that were there and stay as they are.
    left_out: answers without a sidecar, by the reason; examples: the first picture of each.
    num_joined: written ones that had several lines, of the answer or of the text that was there.
    """

    suffix: str
    num_written: int = 0
    num_kept: int = 0
    num_joined: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    num_failed: int = 0
    examples: dict[str, str] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Returns what a summary says about them."""
        kept = f", {self.num_kept} were there and stay" if self.num_kept else ""
        lines = [f"sidecars: {self.num_written} {self.suffix} written{kept}"]
        if self.num_joined:
            lines.append(f"  {self.num_joined} {JOINED}")
        for reason, num in self.left_out.most_common():
            lines.append(f"  {num} not written: {reason} ({self.examples[reason]})")
        return lines


SpotOf = Callable[[Record], Spot]  # raises RequestError for a record without one picture


class Sidecars(Closing):
    """Writes sidecars. Not thread-safe.

    spot_of: where the picture of a record is. outputs: files of the run, which no sidecar replaces.
    kinds: of files that have sidecars, and whose suffixes no sidecar has.
    num_taken: items of new records.
    """

    def __init__(
        self,
        options: SidecarOptions,
        spot_of: SpotOf,
        outputs: Iterable[str | Path] = (),
        kinds: KindTable = BUILT_IN_KINDS,
    ) -> None:
        check_suffix(options.suffix, kinds)
        self._options, self._spot_of = options, spot_of
        self._places = Places(kinds)
        self._outputs = frozenset(os.path.realpath(own) for own in outputs)
        self._taken = IdSet()
        self.counts = SidecarCounts(suffix=options.suffix)
        self.num_taken = 0

    def take(self, record: Record) -> None:
        """Writes the sidecar of a record that is new."""
        self.num_taken += self._taken.add(record.key)
        self._try(record, is_filled=False)

    def fill(self, records: Iterable[Record]) -> None:
        """Writes sidecars that are missing, of records from earlier runs."""
        for record in records:
            if self._taken.add(record.key):
                self._try(record, is_filled=True)

    def close(self) -> None:
        """Closes the folder that is open."""
        self._places.close()

    def _try(self, record: Record, *, is_filled: bool) -> None:
        counts = self.counts
        try:
            if record.outcome in NO_ANSWER:
                raise RequestError(f"its outcome is {record.outcome}")
            is_written = self._write(record, self._spot_of(record), is_filled=is_filled)
        except (RequestError, ConfigError, OSError) as error:
            words = str((isinstance(error, OSError) and error.strerror) or error)
            counts.left_out[words] += 1
            counts.num_failed += isinstance(error, (ConfigError, OSError))
            counts.examples.setdefault(words, record.path or str(record.id))
            return
        counts.num_written += is_written
        counts.num_kept += not is_written and not is_filled

    def _write(self, record: Record, spot: Spot, *, is_filled: bool) -> bool:
        """Writes one sidecar; returns whether it was written."""
        name, beside = spot.stem + self._options.suffix, self._places.beside(spot)
        beside.check_owner(spot, name)
        folder = beside.folder
        if self._outputs and os.path.realpath(folder.path / name) in self._outputs:
            raise ConfigError("its sidecar would be an output of the run")
        mode = "skip" if is_filled else self._options.on_existing
        there = text_in(folder, name)
        known = (there or "").removeprefix(BYTE_ORDER_MARK).strip()
        if known and mode == "skip":
            return False
        built = self._options.text.of(record, spot.path)
        is_joined, text = built.has_several_lines, built.text
        if known and mode == "append":
            is_joined |= has_several_lines(known)
            text = self._options.text.after(known, text)
        if text == there:
            return False
        if there is not None and is_read_only(folder, name):
            raise RequestError(f"the {self._options.suffix} that is there is read-only")
        write_beside(folder, name, [text.encode() + b"\n"])
        self.counts.num_joined += is_joined
        return True


def write_beside(folder: Folder, name: str, pieces: Iterable[bytes]) -> None:
    """Writes a small file whole, without waiting for the disk. Until it is complete it has a short
    name of this process: its own may be as long as names can be."""
    folder.write(name, pieces, f".{os.getpid()}.mmdeploy-llm.partial", is_synced=False)


def picture_of(record: Record) -> str:
    """Returns the path of the only picture of a record. Raises RequestError without one."""
    if record.path is not None:
        return record.path
    if len(record.media) != 1:
        what = "several pictures" if record.media else "no picture"
        raise RequestError(f"it has {what}, and a sidecar is beside one")
    if not record.media[0].is_file:
        raise RequestError("its picture is no file of its own")
    return record.media[0].name


def page_of(record: Record) -> int | None:
    """Returns the number of the page that a record is about; None for a whole file."""
    pages = record.media[0].pages if len(record.media) == 1 else None
    return int(pages) if pages is not None and pages.isdecimal() else None
