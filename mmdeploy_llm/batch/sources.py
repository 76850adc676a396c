"""Where the items of a batch come from: lines of a file, dicts of an iterable, image and video
files. All are read lazily, and one can be gone through again when it is a file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.params import SamplingParams

from .ids import Selection
from .inputs import find_media, is_video_name
from .items import BadItem, Item, ItemReader
from .lines import Row, count_lines, read_jsonl
from .parquet import ParquetRows
from .records import Record

IMAGE_QUESTION, VIDEO_QUESTION = "Describe the image.", "Describe the video."
ONE_QUESTION = "a prompt for all goes with a folder; lines have their own"
PARQUET_SUFFIXES = (".parquet", ".pq")
MAX_COUNTED_BYTES = 2**30  # a larger file is not read once more to count its lines


class Source(Protocol):
    """Items in order. total: how many, None when that is not known. unit: what one is called."""

    total: int | None
    unit: str

    def __iter__(self) -> Iterator[Item | BadItem]:
        """The items of this run's part of the input."""

    def place_of(self, record: Record) -> int | None:
        """Where the record's item stands in this part; None when it is not in it."""


class LineSource:
    """Rows become items. num_rows: None when not known."""

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
        """The items of the chosen lines."""
        for row in self._rows:
            if self._selection.is_past(row.line):
                return
            if self._selection.takes(row.line):
                if isinstance(row, BadItem):
                    yield row
                else:
                    yield self._reader.read(row.line, row.values)

    def place_of(self, record: Record) -> int | None:
        """Its line."""
        is_ours = record.line is not None and self._selection.takes(record.line)
        return record.line if is_ours else None


class FileSource:
    """One item for each file: a question about it. question: None asks to describe it."""

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
        """The items, in the order of the files."""
        for path, line in self._lines.items():
            yield Item(
                line=line, id=path, path=path, prompt=self._prompt(path), params=self._params
            )

    def place_of(self, record: Record) -> int | None:
        """The place of its file among all."""
        return self._lines.get(record.path) if record.path is not None else None

    def _prompt(self, path: str) -> dict[str, Any]:
        """The path is made absolute, so that no name reads as a URL."""
        kind = "video" if is_video_name(path) else "image"
        question = self._question or (VIDEO_QUESTION if kind == "video" else IMAGE_QUESTION)
        content = [
            {"type": kind, kind: os.path.abspath(path)},
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
    """The source for a JSONL file, a Parquet file, a folder of images and videos with all its
    subfolders, or an iterable of dicts. Raises ConfigError for what cannot be opened.

    Media paths of a file's lines are relative to the file's folder, those of an iterable's dicts
    to the current one.
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
    """The source for files, folders and globs of images and videos. Raises ConfigError when one
    is not there or nothing is found."""
    return FileSource(
        find_media(paths, is_recursive=is_recursive),
        params,
        selection,
        question=question,
        template_kwargs=template_kwargs,
    )


def _open_file(path: Path, reader: ItemReader, selection: Selection) -> Source:
    if not path.is_file():
        raise ConfigError(
            f"{str(path)!r} does not exist; give a JSONL file, a Parquet file or a folder"
        )
    if path.suffix.lower() in PARQUET_SUFFIXES:
        rows = ParquetRows(path)
        return LineSource(rows, reader, selection, rows.num_rows)
    if is_video_name(path.name) or path.suffix.lower() in (".json", ".csv"):
        raise ConfigError(
            f"{path.name!r} is no batch: give a JSONL file (one JSON object a line), a Parquet "
            "file or a folder; `caption` takes single files"
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
