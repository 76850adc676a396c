"""The formats of corpora, and which of them an input has. A new one is a file and a line here, or a
CorpusFormatSpec of a plugin.

Those of this package come through no hook: an input is read alike with any plugins and with none,
and they know what a CorpusFile has not: folders, shards by place, URLs and the hub.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from mmdeploy_llm.data.rows.delimited import DelimitedRows
from mmdeploy_llm.data.rows.files import (
    File,
    base_of,
    find_files,
    listed,
    refuse_commands,
    refuse_links_out,
    suffix_of,
    suffixes_in,
)
from mmdeploy_llm.data.rows.lines import JsonlRows
from mmdeploy_llm.data.rows.names import BUILT_IN_KINDS, is_url
from mmdeploy_llm.data.rows.packed import also_packed, refuse_packed
from mmdeploy_llm.data.rows.rows import MAX_CELL_BYTES, Rows
from mmdeploy_llm.data.rows.tables.hub import SCHEME, hub_options
from mmdeploy_llm.data.rows.tables.remote import TableRows
from mmdeploy_llm.data.rows.tables.serve import Spec
from mmdeploy_llm.data.rows.tars import TarRows
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import CorpusFormatSpec, KindTable
from mmdeploy_llm.hooks.records import Provided
from mmdeploy_llm.values.first_bytes import HEAD

from .folders import is_described, is_saved, open_described, open_saved

logger = logging.getLogger(__name__)


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
NUM_SHARDS = 3  # of FILE_FORMATS, which hold what others may list
FOLDER_FORMATS = (
    _of_names(is_lance, _open_lance),
    _of_names(is_hub, _open_hub),
    _of_names(is_saved, open_saved),
    FolderFormat(is_mine=is_described, open=open_described),
)
SUFFIXES = tuple(suffix for known in FILE_FORMATS for suffix in known.suffixes)


def all_suffixes(kinds: KindTable) -> tuple[str, ...]:
    """Returns what names of corpora end in, those that plugins read too, the longest first."""
    return tuple(sorted({*SUFFIXES, *kinds.formats}, key=lambda suffix: (-len(suffix), suffix)))


def _formats(kinds: KindTable) -> Iterator[FileFormat]:
    """Yields all formats; of a folder with several the first one counts. Those of plugins come
    after shards and before lists of what shards hold."""
    taken = {suffix for suffix in SUFFIXES if _foreign(suffix, kinds) is not None}
    for known in FILE_FORMATS[:NUM_SHARDS]:
        yield replace(known, suffixes=tuple(own for own in known.suffixes if own not in taken))
    by_format: dict[int, list[str]] = {}
    own = {id(found): found for found in kinds.formats.values()}
    for suffix in kinds.formats:
        if suffix not in SUFFIXES or suffix in taken:
            by_format.setdefault(id(kinds.formats[suffix]), []).append(suffix)
    for key, suffixes in by_format.items():
        yield FileFormat(suffixes=tuple(suffixes), open=_read_by(own[key]))
    for known in FILE_FORMATS[NUM_SHARDS:]:
        yield replace(known, suffixes=tuple(own for own in known.suffixes if own not in taken))


def _foreign(suffix: str | None, kinds: KindTable) -> Provided[CorpusFormatSpec] | None:
    """Returns the plugin's format of a suffix. Of one that is read without plugins it is the
    plugin's unless its priority is below 0."""
    found = None if suffix is None else kinds.format_of(suffix)
    return None if found is None or (suffix in SUFFIXES and found.spec.priority < 0) else found


def _read_by(found: Provided[CorpusFormatSpec]) -> OpenFiles:
    """Returns what opens files of a plugin's format."""

    def opened(files: Sequence[File], max_bytes: int, _: KindTable) -> Rows:
        return TableRows(
            Spec(
                kind="plugin",
                given=files[0].path,
                files=tuple(files),
                max_bytes=max_bytes,
                is_counted=False,
                format=found,
            )
        )

    return opened


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
    """Returns the format by the suffix, in a folder by the suffixes of its files; by the first
    bytes for a file whose suffix nobody knows, JSONL for one without a suffix, None for a folder of
    media."""
    suffixes = all_suffixes(kinds)
    if not is_url(given) and os.path.isdir(given):
        present = suffixes_in(given, suffixes, kinds)
    else:
        suffix = suffix_of(given, suffixes)
        begun = _by_first_bytes(given, kinds) if suffix is None else None
        if begun is not None:
            return FileFormat(suffixes=begun.spec.suffixes, open=_read_by(begun))
        if suffix is None:
            refuse_packed(given, suffixes)
        # A pipe or a file without any suffix holds JSON lines; a URL or a pattern says nothing.
        if suffix is None and (not os.path.lexists(given) or os.path.splitext(given)[1]):
            raise ConfigError(f"{given!r} has an unknown suffix; known are {_listed(kinds)}")
        _tell(suffix, kinds)
        present = frozenset({suffix or ".jsonl"})
    if not present:
        return None
    return next((known for known in _formats(kinds) if present & {*known.suffixes}), None)


def _by_first_bytes(given: str, kinds: KindTable) -> Provided[CorpusFormatSpec] | None:
    if not kinds.format_bytes or is_url(given) or not os.path.isfile(given):
        return None  # nothing is taken from a pipe
    try:
        with open(given, "rb") as file:
            return kinds.format_of(None, file.read(HEAD))
    except OSError as error:
        raise ConfigError(f"{given!r} cannot be read: {error}") from None


def _listed(kinds: KindTable) -> str:
    return " ".join(dict.fromkeys((*SUFFIXES, *kinds.formats)))


def _tell(suffix: str | None, kinds: KindTable) -> None:
    """Says that a plugin reads what is read without it."""
    found = _foreign(suffix, kinds)
    if found is not None and suffix in SUFFIXES:
        logger.warning(
            "%s files are read by %s, not by what is built in; to choose: blocked_plugins=(%r,)",
            suffix,
            found.origin,
            found.origin.name,
        )
