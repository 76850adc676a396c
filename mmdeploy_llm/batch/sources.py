"""Sources of a batch's items: rows of a corpus, dicts of an iterable, files of media (in
file_source.py).

All are read lazily; a source backed by files can be iterated again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, Protocol

from mmdeploy_llm.batch.questions.asks import NO_ASKS, Asks
from mmdeploy_llm.data.files.chosen_kinds import ChosenKinds
from mmdeploy_llm.data.files.files import find_media
from mmdeploy_llm.data.files.missing import CORPORA, no_corpus
from mmdeploy_llm.data.files.options import FindingOptions
from mmdeploy_llm.data.files.skipped import Skipped
from mmdeploy_llm.data.outputs.sidecars.options import DEFAULT_SUFFIX
from mmdeploy_llm.data.records.ids import Selection
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.rows.files import is_pattern
from mmdeploy_llm.data.rows.formats.formats import open_rows
from mmdeploy_llm.data.rows.names import is_media_name, is_url
from mmdeploy_llm.data.rows.rows import MAX_CELL_BYTES, BadItem, Lines, Row, Rows
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import KindTable
from mmdeploy_llm.values.params import SamplingParams

from .corpus.columns import ColumnOptions
from .corpus.questions import QuestionReader
from .file_source import FileSource
from .items import ItemReader

logger = logging.getLogger(__name__)

MAX_NAMED = 3  # ids in a message


class Source(Protocol):
    """Items in order. total: their number, None when unknown. unit: the noun for one item. about:
    where its media and questions come from, "" when that is plain. mean_size: bytes of an item's
    file, None when they are not known. skipped: what is not read."""

    total: int | None
    mean_size: float | None
    unit: str
    about: str
    skipped: Skipped

    def __iter__(self) -> Iterator[Item | BadItem]:
        """Yields the selected items of the input."""

    def read(self, lines: Lines) -> Iterator[Item | BadItem]:
        """Yields the items of these lines, in order. They must be selected ones."""

    def sizes(self) -> Mapping[int, int]:
        """Returns the bytes of the file of every item by its line; none where they are not
        known."""

    def kinds(self) -> Mapping[int, str]:
        """Returns the kind of the file of every item by its line; none where `sizes` has none."""

    def place_of(self, record: Record) -> int | None:
        """Returns the position of the record's item in the input; None when not selected."""

    def counted(self) -> int | None:
        """Counts the items again, as `total` does: blank lines too."""


class LineSource:
    """Builds items from rows."""

    unit = "item"
    mean_size: float | None = None

    def __init__(self, rows: Rows, reader: QuestionReader, selection: Selection) -> None:
        self._rows, self._reader, self._selection = rows, reader, selection
        told = [reader.about]
        if selection.seed is not None:
            num_rows = _counted(rows)
            self._selection = selection.over(num_rows)
            told.append(self._selection.words(num_rows))
        self.total = self.counted()
        self.about = "\n".join(filter(None, told))
        self.skipped = Skipped()

    def __iter__(self) -> Iterator[Item | BadItem]:
        """Yields the items of the selected rows. Raises ConfigError when none has an id of
        --only."""
        only = self._selection.only or frozenset()
        left = set(only)
        for item in self.read(self._selection):
            left.discard(str(item.id))
            yield item
        if left:
            names = ", ".join(map(repr, sorted(left)[:MAX_NAMED]))
            if len(left) == len(only):
                raise ConfigError(f"no item of the input has an id of --only: {names}")
            logger.warning("--only: no item of the input has %d of the ids: %s", len(left), names)

    def read(self, lines: Lines) -> Iterator[Item | BadItem]:
        """Yields the items of these rows, of those that --only names."""
        for row in self._rows.read(lines):
            item = self._reader.read(row)
            if self._selection.takes_id(item.id):
                yield item

    def sizes(self) -> Mapping[int, int]:
        """Returns none: the bytes of media in rows are not known before they are read."""
        return {}

    def kinds(self) -> Mapping[int, str]:
        """Returns none, as `sizes` does."""
        return {}

    def counted(self) -> int | None:
        """Counts the selected rows that the input has now."""
        num_rows = self._rows.num_rows
        return None if num_rows is None else self._selection.count(num_rows)

    def place_of(self, record: Record) -> int | None:
        """Returns the record's line number; None when not selected."""
        is_ours = record.line is not None and self._selection.takes(record.line)
        is_ours = is_ours and self._selection.takes_id(record.id)
        return record.line if is_ours else None


def _counted(rows: Rows) -> int:
    """Counts rows, by reading them where the format does not say. Raises ConfigError for those that
    can be read once only."""
    if rows.num_rows is not None:
        return rows.num_rows
    if not rows.is_repeatable:
        raise ConfigError("random items cannot be drawn of an iterator; give a list or a file")
    return sum(1 for _ in rows.read(Selection()))


def open_source(
    given: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
    params: SamplingParams,
    selection: Selection,
    *,
    question: str | None = None,
    asks: Asks = NO_ASKS,
    template_kwargs: Mapping[str, Any] | None = None,
    system: str | None = None,
    columns: ColumnOptions | None = None,
    max_bytes: int = MAX_CELL_BYTES,
    root: str | os.PathLike[str] | None = None,
    finding: FindingOptions | None = None,
    is_recursive: bool = True,
    sidecar: str = DEFAULT_SUFFIX,
) -> Source:
    """Opens a corpus (see data/rows/formats/formats.py), a folder of media, with its subfolders if
    `is_recursive`, a glob of them, or an iterable of dicts. Raises ConfigError for an input that
    cannot be opened.

    Media paths in a file are relative to the file's folder, those in dicts to the working folder.
    max_bytes: of one media item inside of a corpus. root: see open_rows.
    """
    columns = columns or ColumnOptions()
    finding = finding or FindingOptions()
    wanted = finding.wanted()
    reader = ItemReader(None, params, template_kwargs, system, wanted.table)
    rows = _rows_of(given, max_bytes, root, wanted.table)
    if rows is not None:
        asked = QuestionReader(rows, reader, columns, question, asks, wanted.table)
        return LineSource(rows, asked, selection)
    assert isinstance(given, (str, os.PathLike))
    name = os.fspath(given)
    if columns.values():
        raise ConfigError(f"{name!r} is media, which has no columns; {CORPORA}")
    return open_files(
        [name],
        params,
        selection,
        is_recursive=is_recursive,
        question=question,
        asks=asks,
        template_kwargs=template_kwargs,
        finding=finding,
        wanted=wanted,
        system=system,
        sidecar=sidecar,
    )


def _rows_of(
    given: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
    max_bytes: int,
    root: str | os.PathLike[str] | None,
    kinds: KindTable,
) -> Rows | None:
    """Returns the rows of an input; None for media. Raises ConfigError as open_source does."""
    if not isinstance(given, (str, os.PathLike)):
        return DictRows(given)
    name = os.fspath(given)
    _check_name(name, kinds)
    return None if _is_media_glob(name, kinds) else open_rows(name, max_bytes, root, kinds)


def open_files(
    paths: Iterable[str],
    params: SamplingParams,
    selection: Selection,
    *,
    is_recursive: bool = True,
    question: str | None = None,
    asks: Asks = NO_ASKS,
    template_kwargs: Mapping[str, Any] | None = None,
    finding: FindingOptions | None = None,
    wanted: ChosenKinds | None = None,
    system: str | None = None,
    sidecar: str = DEFAULT_SUFFIX,
) -> Source:
    """Opens files, folders and globs of media. wanted: that of `finding`, where it is known.

    Raises ConfigError when a path does not exist or no file is found.
    """
    finding = finding or FindingOptions()
    found = find_media(
        paths,
        is_recursive=is_recursive,
        exclude=finding.exclude,
        animated=finding.how_animated,
        wanted=wanted or finding.wanted(),
    )
    source: Source = (finding.new_source or FileSource)(
        found,
        params,
        selection,
        question=question,
        asks=asks,
        template_kwargs=template_kwargs,
        system=system,
        sidecar=sidecar,
    )
    return source


def _check_name(name: str, kinds: KindTable) -> None:
    """Raises ConfigError for an input that does not exist, or is of a kind that is no batch."""
    is_named = is_url(name) or is_pattern(name) or name.startswith("pipe:")
    if not os.path.exists(name) and not is_named:
        raise ConfigError(no_corpus(name))
    is_one = is_media_name(name, kinds) and not _is_media_glob(name, kinds)
    if not os.path.isdir(name) and (is_one or name.lower().endswith(".json")):
        raise ConfigError(f"{name!r} is not a batch: {CORPORA}; `caption` accepts single files")


def _is_media_glob(name: str, kinds: KindTable) -> bool:
    """Returns whether an input is a glob of media, such as photos/**/*.jpg."""
    is_glob = is_pattern(name) and not os.path.lexists(name) and not is_url(name)
    return is_glob and is_media_name(name, kinds)


class DictRows:
    """The dicts of an iterable; those of an iterator can be read once."""

    is_by_suffix = False
    is_table = False

    def __init__(self, given: Iterable[Any]) -> None:
        self._given = given

    @property
    def is_repeatable(self) -> bool:
        """Whether they are in a list or the like."""
        return isinstance(self._given, Sized)

    @property
    def num_rows(self) -> int | None:
        """Their number, None for an iterator."""
        return len(self._given) if isinstance(self._given, Sized) else None

    def read(self, lines: Lines) -> Iterator[Row | BadItem]:
        """Yields the wanted dicts."""
        for line, values in enumerate(self._given, 1):
            if lines.is_past(line):
                return
            if lines.takes(line):
                yield Row(line=line, values=values)
