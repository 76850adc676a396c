"""Sources of a batch's items: lines of a file, dicts of an iterable, image and video files.

All are read lazily; a source backed by files can be iterated again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.params import SamplingParams

from .ids import Selection
from .inputs import find_media, is_video_name
from .items import BadItem, Item, ItemReader, is_url
from .lines import Row, count_lines, read_jsonl
from .parquet import ParquetRows
from .records import Record
from .storage.identity import digest_of, file_state

IMAGE_QUESTION, VIDEO_QUESTION = "Describe the image.", "Describe the video."
ONE_QUESTION = (
    "a prompt for all items needs a folder of media; each line of a file has its own prompt"
)
PARQUET_SUFFIXES = (".parquet", ".pq")
MAX_COUNTED_BYTES = 2**30  # the lines of a larger file are not counted in advance


class Source(Protocol):
    """Items in order. total: their number, None when unknown. unit: the noun for one item."""

    total: int | None
    unit: str

    def __iter__(self) -> Iterator[Item | BadItem]:
        """Yields the selected items of the input."""

    def place_of(self, record: Record) -> int | None:
        """Returns the position of the record's item in the input; None when not selected."""


class LineSource:
    """Builds items from rows. num_rows: their number, None when unknown."""

    unit = "item"

    def __init__(
        self,
        rows: Iterable[Row | BadItem],
        reader: ItemReader,
        selection: Selection,
        num_rows: int | None = None,
    ) -> None:
        self._rows = rows
        self._reader = reader
        self._selection = selection
        self.total = None if num_rows is None else selection.count(num_rows)

    def __iter__(self) -> Iterator[Item | BadItem]:
        """Yields the items of the selected lines."""
        for row in self._rows:
            if self._selection.is_past(row.line):
                return
            if self._selection.takes(row.line):
                if isinstance(row, BadItem):
                    yield row
                else:
                    yield self._reader.read(row.line, row.values)

    def place_of(self, record: Record) -> int | None:
        """Returns the record's line number; None when not selected."""
        is_ours = record.line is not None and self._selection.takes(record.line)
        return record.line if is_ours else None


class FileSource:
    """Builds one item per file: a question about it. question: None asks for a description."""

    def __init__(
        self,
        paths: Iterable[str],
        params: SamplingParams,
        selection: Selection,
        *,
        question: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        numbered = enumerate(paths, 1)
        self._lines = {path: line for line, path in numbered if selection.takes(line)}
        self._params = params
        self._question = question
        self._template_kwargs = dict(template_kwargs or {})
        self.total: int | None = len(self._lines)
        self.unit = "file" if any(map(is_video_name, self._lines)) else "image"

    def __iter__(self) -> Iterator[Item | BadItem]:
        """Yields the items in the order of the files."""
        for path, line in self._lines.items():
            yield Item(
                line=line,
                id=path,
                path=path,
                prompt=self._prompt(path),
                params=self._params,
                digest=digest_of(file_state(path)),
            )

    def place_of(self, record: Record) -> int | None:
        """Returns the position of the record's file in the list; None when not selected."""
        return self._lines.get(record.path) if record.path is not None else None

    def _prompt(self, path: str) -> dict[str, Any]:
        """Builds the prompt, with an absolute path where the name would be read as a URL."""
        kind = "video" if is_video_name(path) else "image"
        question = self._question or (VIDEO_QUESTION if kind == "video" else IMAGE_QUESTION)
        content = [
            {"type": kind, kind: os.path.abspath(path) if is_url(path) else path},
            {"type": "text", "text": question},
        ]
        messages = [{"role": "user", "content": content}]
        return {"messages": messages, "chat_template_kwargs": dict(self._template_kwargs)}


def open_source(
    given: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
    params: SamplingParams,
    selection: Selection,
    *,
    question: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Source:
    """Opens a JSONL file, a Parquet file, a folder of images and videos with all its subfolders,
    or an iterable of dicts. Raises ConfigError for an input that cannot be opened.

    Media paths in a file are relative to the file's folder, those in dicts to the working folder.
    """
    if not isinstance(given, (str, os.PathLike)):
        if question is not None:
            raise ConfigError(ONE_QUESTION)
        reader = ItemReader(None, params, template_kwargs)
        rows = (Row(line=line, values=values) for line, values in enumerate(given, 1))
        return LineSource(rows, reader, selection, _length(given))
    path = Path(given)
    if path.is_dir():
        return open_files(
            [str(path)],
            params,
            selection,
            is_recursive=True,
            question=question,
            template_kwargs=template_kwargs,
        )
    if question is not None:
        raise ConfigError(ONE_QUESTION)
    return _open_file(path, ItemReader(str(path.parent), params, template_kwargs), selection)


def open_files(
    paths: Iterable[str],
    params: SamplingParams,
    selection: Selection,
    *,
    is_recursive: bool = False,
    question: str | None = None,
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
        template_kwargs=template_kwargs,
    )


def _open_file(path: Path, reader: ItemReader, selection: Selection) -> Source:
    if not path.is_file():
        fault = "is not a regular file" if os.path.lexists(path) else "does not exist"
        raise ConfigError(f"{str(path)!r} {fault}; give a JSONL file, a Parquet file or a folder")
    if path.suffix.lower() in PARQUET_SUFFIXES:
        rows = ParquetRows(path)
        return LineSource(rows, reader, selection, rows.num_rows)
    if is_video_name(path.name) or path.suffix.lower() in (".json", ".csv"):
        raise ConfigError(
            f"{str(path)!r} is not a batch: give a JSONL file (one JSON object per line), a "
            "Parquet file or a folder; `caption` accepts single files"
        )
    num_lines = count_lines(path) if path.stat().st_size <= MAX_COUNTED_BYTES else None
    return LineSource(_JsonlRows(path), reader, selection, num_lines)


class _JsonlRows:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[Row | BadItem]:
        return read_jsonl(self._path)


def _length(given: Any) -> int | None:
    return len(given) if hasattr(given, "__len__") else None
