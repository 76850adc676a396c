"""Sources of a batch's items: rows of a corpus, dicts of an iterable, image and video files.

All are read lazily; a source backed by files can be iterated again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, Protocol

from mmdeploy_llm.datasets.files import is_pattern
from mmdeploy_llm.datasets.formats import KINDS, open_rows
from mmdeploy_llm.datasets.names import is_media_name, is_url, is_video_name
from mmdeploy_llm.datasets.rows import MAX_CELL_BYTES, BadItem, Lines, Row, Rows
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.params import SamplingParams
from mmdeploy_llm.questions.asks import NO_ASKS, Asks, questions_about, with_system
from mmdeploy_llm.records.identity import digest_of, file_state
from mmdeploy_llm.records.ids import Selection
from mmdeploy_llm.records.item import Item, Question
from mmdeploy_llm.records.record import Record

from .corpus.columns import ColumnOptions, check_no_columns
from .corpus.questions import IMAGE_QUESTION, VIDEO_QUESTION, QuestionReader
from .inputs import find_media
from .items import ItemReader
from .order import mixed, sizes_of


class Source(Protocol):
    """Items in order. total: their number, None when unknown. unit: the noun for one item. about:
    where its media and questions come from, "" when that is plain. mean_size: bytes of an item's
    file, None when they are not known."""

    total: int | None
    mean_size: float | None
    unit: str
    about: str

    def __iter__(self) -> Iterator[Item | BadItem]:
        """Yields the selected items of the input."""

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
        self.total = self.counted()
        self.about = reader.about

    def __iter__(self) -> Iterator[Item | BadItem]:
        """Yields the items of the selected rows."""
        for row in self._rows.read(self._selection):
            yield row if isinstance(row, BadItem) else self._reader.read(row)

    def counted(self) -> int | None:
        """Counts the selected rows that the input has now."""
        num_rows = self._rows.num_rows
        return None if num_rows is None else self._selection.count(num_rows)

    def place_of(self, record: Record) -> int | None:
        """Returns the record's line number; None when not selected."""
        is_ours = record.line is not None and self._selection.takes(record.line)
        return record.line if is_ours else None


class FileSource:
    """Builds one item per file: the questions about it. question: None asks for a description,
    unless `asks` has questions."""

    about = ""

    def __init__(
        self,
        paths: Iterable[str],
        params: SamplingParams,
        selection: Selection,
        *,
        question: str | None = None,
        asks: Asks = NO_ASKS,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        numbered = [*enumerate(paths, 1)]
        for text in (*([] if question is None else [question]), *asks.questions.values()):
            check_no_columns(text, (path for _, path in numbered))
        self._lines = {path: line for line, path in numbered if selection.takes(line)}
        self._params = params
        self._question, self._asks = question, asks
        self._template_kwargs = dict(template_kwargs or {})
        self._sizes = sizes_of(self._lines)
        self.total: int | None = len(self._lines)
        self.mean_size: float | None = sum(self._sizes.values()) / max(1, len(self._sizes))
        self.unit = "file" if any(map(is_video_name, self._lines)) else "image"

    def __iter__(self) -> Iterator[Item | BadItem]:
        """Yields the items, large files among small ones."""
        for path in mixed(self._sizes):
            questions = self._questions(path)
            yield Item(
                line=self._lines[path],
                id=path,
                path=path,
                prompt=questions[0].prompt,
                questions=questions if self._asks.questions else (),
                params=self._params,
                digest=digest_of(file_state(path)),
                size=self._sizes[path],
            )

    def counted(self) -> int | None:
        """Returns the number of files, which are listed once."""
        return self.total

    def place_of(self, record: Record) -> int | None:
        """Returns the position of the record's file in the list; None when not selected."""
        return self._lines.get(record.path) if record.path is not None else None

    def _questions(self, path: str) -> tuple[Question, ...]:
        """Builds the prompts, with an absolute path where the name would be read as a URL."""
        kind = "video" if is_video_name(path) else "image"
        plain = self._question or (VIDEO_QUESTION if kind == "video" else IMAGE_QUESTION)
        media = {"type": kind, kind: os.path.abspath(path) if is_url(path) else path}
        messages = [{"role": "user", "content": [media]}]
        prompt = {"messages": messages, "chat_template_kwargs": dict(self._template_kwargs)}
        prompt = with_system(prompt, self._asks.system)
        return questions_about(prompt, self._asks.questions or {"": plain})


def open_source(
    given: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
    params: SamplingParams,
    selection: Selection,
    *,
    question: str | None = None,
    asks: Asks = NO_ASKS,
    template_kwargs: Mapping[str, Any] | None = None,
    columns: ColumnOptions | None = None,
    max_bytes: int = MAX_CELL_BYTES,
    root: str | os.PathLike[str] | None = None,
    is_recursive: bool = True,
) -> Source:
    """Opens a corpus (see datasets/formats.py), a folder of images and videos, with its subfolders
    if `is_recursive`, or an iterable of dicts. Raises ConfigError for an input that cannot be
    opened.

    Media paths in a file are relative to the file's folder, those in dicts to the working folder.
    max_bytes: of one image or video inside of a corpus. root: see open_rows.
    """
    columns = columns or ColumnOptions()
    reader = ItemReader(None, params, template_kwargs, asks.system)
    if not isinstance(given, (str, os.PathLike)):
        dicts = DictRows(given)
        return LineSource(dicts, QuestionReader(dicts, reader, columns, question, asks), selection)
    name = os.fspath(given)
    _check_name(name)
    rows = open_rows(name, max_bytes, root)
    if rows is not None:
        return LineSource(rows, QuestionReader(rows, reader, columns, question, asks), selection)
    if columns.values():
        raise ConfigError(f"{name!r} is a folder of media, which has no columns; {KINDS}")
    return open_files(
        [name],
        params,
        selection,
        is_recursive=is_recursive,
        question=question,
        asks=asks,
        template_kwargs=template_kwargs,
    )


def open_files(
    paths: Iterable[str],
    params: SamplingParams,
    selection: Selection,
    *,
    is_recursive: bool = True,
    question: str | None = None,
    asks: Asks = NO_ASKS,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Source:
    """Opens files, folders and globs of images and videos.

    Raises ConfigError when a path does not exist or no file is found.
    """
    return FileSource(
        find_media(paths, is_recursive=is_recursive),
        params,
        selection,
        question=question,
        asks=asks,
        template_kwargs=template_kwargs,
    )


def _check_name(name: str) -> None:
    """Raises ConfigError for an input that does not exist, or is of a kind that is no batch."""
    is_named = is_url(name) or is_pattern(name) or name.startswith("pipe:")
    if not os.path.exists(name) and not is_named:
        raise ConfigError(f"{name!r} does not exist; {KINDS}")
    if not os.path.isdir(name) and (is_media_name(name) or name.lower().endswith(".json")):
        raise ConfigError(f"{name!r} is not a batch: {KINDS}; `caption` accepts single files")


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
