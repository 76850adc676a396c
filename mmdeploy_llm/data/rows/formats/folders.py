"""Reads folders in the layouts of the library `datasets`: what `save_to_disk` has written, and
folders of media with a metadata file. The library itself is not asked: it opens what a README.md
there names, on this machine and elsewhere.

    saved/      state.json  dataset_info.json  data-00000-of-00002.arrow ...
    splits/     dataset_dict.json  train/ (as saved/)  test/ ...
    media/      metadata.csv | metadata.jsonl | metadata.parquet   0.png  1.png ...

A metadata file names the media in the column `file_name`, or in columns that end in `_file_name`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmdeploy_llm.data.rows.delimited import DelimitedRows
from mmdeploy_llm.data.rows.files import File, suffixes_in
from mmdeploy_llm.data.rows.lines import JsonlRows
from mmdeploy_llm.data.rows.names import is_url
from mmdeploy_llm.data.rows.rows import MAX_SHOWN, BadItem, Lines, Row, Rows
from mmdeploy_llm.data.rows.tables.remote import TableRows
from mmdeploy_llm.data.rows.tables.serve import Spec
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import KindTable

SAVED = ("state.json", "dataset_info.json")  # one split
SAVED_SPLITS = "dataset_dict.json"
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
FILE_NAME = "file_name"
MAX_STATE_BYTES = 16 * 2**20


def is_saved(given: str) -> bool:
    """Returns whether an input is a folder that `save_to_disk` has written."""
    return all(_has(given, name) for name in SAVED) or _has(given, SAVED_SPLITS)


def is_described(given: str, kinds: KindTable) -> bool:
    """Returns whether an input is a folder of media with a metadata file."""
    is_folder = not is_url(given) and os.path.isdir(given)
    has_file = is_folder and any(_has(given, name) for name in METADATA)
    return has_file and suffixes_in(given, (), kinds) is None  # None: it has media


def open_saved(given: str, max_bytes: int) -> Rows:
    """Opens a folder that `save_to_disk` has written. Raises ConfigError for one that has several
    splits, or names files outside of it."""
    folder = given if _has(given, SAVED[0]) else os.path.join(given, _only_split(given))
    state = _state(os.path.join(folder, SAVED[0]))
    if any(state.get(name) for name in ("_indices_files", "_indices_data_files")):
        raise ConfigError(
            f"{folder!r} holds a selection of rows as indices; save it again with `datasets`"
        )
    names = [_plain(folder, entry) for entry in _entries(folder, state)]
    files = [File(path=os.path.join(folder, name), name=name) for name in names]
    if not files:
        raise ConfigError(f"{folder!r} lists no files of data")
    return TableRows(Spec(kind="arrow", given=given, files=files, max_bytes=max_bytes))


def open_described(given: str, max_bytes: int, kinds: KindTable) -> Rows:
    """Opens a folder of media with a metadata file."""
    name = next(name for name in METADATA if _has(given, name))
    files = [File(path=os.path.join(given, name), name=name)]
    readers: Mapping[str, Callable[[], Rows]] = {
        METADATA[0]: lambda: DelimitedRows(files),
        METADATA[1]: lambda: JsonlRows(files),
        METADATA[2]: lambda: TableRows(
            Spec(kind="parquet", given=given, files=files, max_bytes=max_bytes)
        ),
    }
    return DescribedRows(given, readers[name](), kinds)


class DescribedRows:
    """The rows of a metadata file, each with its media. A name of a file that is not beneath the
    folder makes its row a BadItem. kinds: by whose suffixes a name tells its kind."""

    is_table = True
    is_by_suffix = False
    is_repeatable = True

    def __init__(self, folder: str, rows: Rows, kinds: KindTable) -> None:
        self._folder, self._rows, self._kinds = folder, rows, kinds

    @property
    def num_rows(self) -> int | None:
        """The number of rows, None when that is known only after reading them."""
        return self._rows.num_rows

    def read(self, lines: Lines) -> Iterator[Row | BadItem]:
        """Yields the wanted rows."""
        for row in self._rows.read(lines):
            yield row if isinstance(row, BadItem) else self._with_media(row)

    def _with_media(self, row: Row) -> Row | BadItem:
        if not isinstance(row.values, Mapping):
            return BadItem(line=row.line, message="a line of metadata must be an object")
        media: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for name, value in row.values.items():
            if name != FILE_NAME and not name.endswith(f"_{FILE_NAME}"):
                others[name] = value
                continue
            if not isinstance(value, str) or not _is_beneath(value):
                shown = f"{value!r}"[:MAX_SHOWN]
                message = f"{name} must be the path of a file beneath the folder, got {shown}"
                return BadItem(line=row.line, message=message)
            kind = self._kinds.of_name(value) or "image"
            column = kind if name == FILE_NAME else name.removesuffix(f"_{FILE_NAME}")
            media[column] = {"path": os.path.join(self._folder, value)}
        return replace(row, values={**media, **others})


def _has(folder: str, name: str) -> bool:
    return not is_url(folder) and os.path.isfile(os.path.join(folder, name))


def _is_beneath(name: str) -> bool:
    """Returns whether a name leads to a file beneath the folder that it is relative to."""
    parts = name.replace("\\", "/").split("/")
    is_relative = not os.path.isabs(name) and not is_url(name)
    return is_relative and ".." not in parts and bool({*parts} - {"", "."})


def _state(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            state = json.loads(file.read(MAX_STATE_BYTES))
        if isinstance(state, dict):
            return state
        reason = "it is not an object"
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error)[:MAX_SHOWN]
    raise ConfigError(f"{path!r} cannot be read: {reason}")


def _only_split(given: str) -> str:
    splits = _state(os.path.join(given, SAVED_SPLITS)).get("splits")
    names: Sequence[Any] = splits if isinstance(splits, list) else ()
    if len(names) == 1:
        return _plain(given, names[0])
    has = ", ".join(map(repr, names))[:MAX_SHOWN] or "none"
    raise ConfigError(f"{given!r} has the splits {has}; choose one by the folder of one of them")


def _entries(folder: str, state: Mapping[str, Any]) -> list[Any]:
    found = state.get("_data_files")
    entries = found if isinstance(found, list) else []
    return [entry.get("filename") if isinstance(entry, dict) else entry for entry in entries]


def _plain(folder: str, name: Any) -> str:
    """Returns the name of a file or folder that is listed in a folder. Raises ConfigError when it
    leads out of it."""
    if isinstance(name, str) and _is_beneath(name) and Path(folder, name).exists():
        return name
    shown = f"{name!r}"[:MAX_SHOWN]
    raise ConfigError(f"{folder!r} lists {shown}, which is no file beneath it")
