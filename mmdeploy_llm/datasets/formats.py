"""The formats of corpora, and which of them an input has. A new one is a file and a line here."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import KindTable

from .delimited import DelimitedRows
from .files import (
    File,
    base_of,
    find_files,
    listed,
    refuse_commands,
    refuse_links_out,
    suffix_of,
    suffixes_in,
)
from .folders import is_described, is_saved, open_described, open_saved
from .lines import JsonlRows
from .names import BUILT_IN_KINDS, is_url
from .packed import also_packed, refuse_packed
from .rows import MAX_CELL_BYTES, Rows
from .tables.hub import SCHEME, hub_options
from .tables.remote import TableRows
from .tables.serve import Spec
from .tars import TarRows


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """A format of files. open: takes the files, the largest media item in bytes, and the kinds of
    media."""

    suffixes: tuple[str, ...]
    open: Callable[[Sequence[File], int, KindTable], Rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFormat:
    """A format whose corpus is a folder or a name. is_mine: whether an input has it."""

    is_mine: Callable[[str, KindTable], bool]
    open: Callable[[str, int, KindTable], Rows]


def _table_of(kind: str) -> Callable[[Sequence[File], int], Rows]:
    """Returns what opens files of tables."""

    def opened(files: Sequence[File], max_bytes: int) -> Rows:
        is_counted = kind == "parquet"  # others must be read to be counted
        return TableRows(
            Spec(
                kind=kind,
                given=files[0].path,
                files=tuple(files),
                max_bytes=max_bytes,
                is_counted=is_counted,
            )
        )

    return opened


def is_lance(given: str) -> bool:
    """Returns whether an input is a Lance table: a folder or URL that ends in .lance."""
    return given.rstrip("/").endswith(".lance")


def is_hub(given: str) -> bool:
    """Returns whether an input is a dataset of the hub, not one of its files."""
    name, _, _ = given.removeprefix(SCHEME).partition("?")
    return given.startswith(SCHEME) and name.count("/") <= 1


def _open_lance(given: str, max_bytes: int) -> Rows:
    return TableRows(Spec(kind="lance", given=given, max_bytes=max_bytes))


def _open_hub(given: str, max_bytes: int) -> Rows:
    hub_options(given)
    return TableRows(Spec(kind="hub", given=given, max_bytes=max_bytes))


OpenFiles = Callable[[Sequence[File], int, KindTable], Rows]


def _as_text(open: Callable[[Sequence[File], int], Rows]) -> OpenFiles:
    """Returns what opens files whose format knows no kinds of media."""
    return lambda files, max_bytes, _: open(files, max_bytes)


def _of_names(is_mine: Callable[[str], bool], open: Callable[[str, int], Rows]) -> FolderFormat:
    """Returns a format of folders that knows no kinds of media."""
    return FolderFormat(
        is_mine=lambda given, _: is_mine(given),
        open=lambda given, max_bytes, _: open(given, max_bytes),
    )


def _open_tars(files: Sequence[File], max_bytes: int, kinds: KindTable) -> Rows:
    return TarRows(files, max_bytes, kinds)


# In a folder with files of several formats the first one counts: tools that write shards put lists
# of their content beside them.
FILE_FORMATS = (
    FileFormat(suffixes=(*also_packed(".tar"), ".tgz", ".tzst"), open=_open_tars),
    FileFormat(suffixes=(".parquet", ".pq"), open=_as_text(_table_of("parquet"))),
    FileFormat(suffixes=(".arrow", ".feather", ".ipc"), open=_as_text(_table_of("arrow"))),
    FileFormat(suffixes=also_packed(".jsonl", ".ndjson"), open=_as_text(JsonlRows)),
    FileFormat(suffixes=also_packed(".csv", ".tsv"), open=_as_text(DelimitedRows)),
)
FOLDER_FORMATS = (
    _of_names(is_lance, _open_lance),
    _of_names(is_hub, _open_hub),
    _of_names(is_saved, open_saved),
    FolderFormat(is_mine=is_described, open=open_described),
)
SUFFIXES = tuple(suffix for known in FILE_FORMATS for suffix in known.suffixes)
KINDS = (
    "give a JSONL, CSV, TSV, Parquet, Arrow or tar file, a glob or folder of them, a Lance table, "
    "a Hugging Face dataset or a folder of media"
)


def open_rows(
    given: str,
    max_bytes: int = MAX_CELL_BYTES,
    root: str | os.PathLike[str] | None = None,
    kinds: KindTable = BUILT_IN_KINDS,
) -> Rows | None:
    """Opens the corpus that a path, a pattern or a URL names; returns None for a folder of media.

    max_bytes: of one media item. root: allowed_media_root; links of a folder or pattern may lead to
    files beneath it, and else only to files of the corpus. kinds: of media that names tell. Raises
    ConfigError for an input that cannot be opened.
    """
    refuse_commands(given)
    for folder in FOLDER_FORMATS:
        if folder.is_mine(given, kinds):
            if root is not None and not is_url(given):
                refuse_links_out(listed(given), given, root)
            return folder.open(given, max_bytes, kinds)
    found = _format_of(given, kinds)
    if found is None:
        return None
    files = find_files(given, found.suffixes)
    named = (file.path for file in files if file.path != given)
    refuse_links_out(named, base_of(given), root)
    return found.open(files, max_bytes, kinds)


def _format_of(given: str, kinds: KindTable) -> FileFormat | None:
    """Returns the format by the suffix, in a folder by the suffixes of its files; JSONL for a file
    without a suffix, None for a folder of media."""
    if not is_url(given) and os.path.isdir(given):
        present = suffixes_in(given, SUFFIXES, kinds)
    else:
        suffix = suffix_of(given, SUFFIXES)
        if suffix is None:
            refuse_packed(given, SUFFIXES)
        # A pipe or a file without any suffix holds JSON lines; a URL or a pattern says nothing.
        if suffix is None and (not os.path.lexists(given) or os.path.splitext(given)[1]):
            raise ConfigError(f"{given!r} has an unknown suffix; known are {' '.join(SUFFIXES)}")
        present = frozenset({suffix or ".jsonl"})
    return next((known for known in FILE_FORMATS if present and present & {*known.suffixes}), None)
