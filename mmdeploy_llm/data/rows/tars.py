"""Reads WebDataset shards: tar files in which neighbouring members of one key make one row.

    000000.tar:  a.jpg a.json a.txt | b.0.png b.1.png b.txt | c.mp4 c.json
                 '---- one row ---'   '---- two images ---'   '- a video -'

Columns are the suffixes of the members: media as bytes, texts, and the fields of the json, and
`__key__`. The id of a row is its shard and its key. Tars are read by the standard library, which
alone yields 2,850 samples a second of 60 kB with a text and a json (one core of a Zen 3); the
package webdataset, which uses the same library, yields 1,790.

Nothing is written to disk and no link is followed: a name from a tar is an id, never a path.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from mmdeploy_llm.errors import MediaLimitError, RequestError
from mmdeploy_llm.hooks import KindTable
from mmdeploy_llm.values.first_bytes import HEAD, format_of
from mmdeploy_llm.values.text.encodings import not_utf8

from .files import File
from .lines import unreadable
from .names import BUILT_IN_KINDS
from .packed import is_packed, open_content
from .rows import MAX_CELL_BYTES, MAX_SHOWN, BadItem, Lines, Row, parse_json

TEXT_SUFFIXES = frozenset((".txt", ".text", ".caption", ".cls", ".json"))
MAX_MEMBERS = 64  # of one key
MAX_TEXT_BYTES = 2**22  # of one text or json
MAX_HEADER_BYTES = 2**20  # of a member's header with all its extensions, such as a long name
MAX_BYTES_AFTER = 2**30  # of packed content after the end of its tar
BY_BYTES = frozenset((".ts",))  # which names TypeScript too: media if it is a transport stream
META = re.compile(r"__[^/]*__(?:/|$)")  # such as __failed__/a.json: no samples, as for webdataset
FAULTS = (tarfile.TarError, OSError, RequestError)


class TarRows:
    """The samples of WebDataset shards, one sample in memory at once.

    A member that is a link, a device, a sparse file or too large is an error of its own sample,
    found before it is read. A tar that is cut off or damaged is an error with the shard's name as
    id; its samples before that place, and all other shards, are read. A packed one is read to the
    end of the stream, where its checksum is: only then is it known whether its samples are right.

    max_bytes: of one media item. kinds: by whose suffixes members are media.
    """

    is_table = False
    is_by_suffix = True
    is_repeatable = True
    num_rows = None

    def __init__(
        self,
        files: Sequence[File],
        max_bytes: int = MAX_CELL_BYTES,
        kinds: KindTable = BUILT_IN_KINDS,
    ) -> None:
        self._files, self._kinds, self._max_bytes = files, kinds, max_bytes

    def read(self, lines: Lines) -> Iterator[Row | BadItem]:
        """Yields the wanted samples, numbered through all shards."""
        line = 0
        for file in self._files:
            try:
                with open_content(file) as opened, closing(_open(opened)) as tar:
                    limits = _Media(kinds=self._kinds, max_bytes=self._max_bytes)
                    samples = _Samples(tar, file.name, limits, lines)
                    for row in samples.read(line + 1):
                        line += 1
                        if lines.is_past(line):
                            return
                        if lines.takes(line):
                            yield row
                    if is_packed(file.path):
                        _read_to_end(opened)
            except FAULTS as error:
                line += 1
                if lines.takes(line):
                    yield unreadable(file, line, error)
            if lines.is_past(line + 1):
                return


class _Header(tarfile.TarInfo):
    """A header whose faults are raised: tarfile takes a damaged one for the end of the tar."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> _Header:
        """Reads the next header. Raises ReadError for a damaged or missing one."""
        try:
            return super().fromtarfile(tar)
        except tarfile.HeaderError as error:
            kind = type(error).__name__
            if kind == "EOFHeaderError":  # the end mark
                raise
            if kind == "EmptyHeaderError":
                raise tarfile.ReadError("it has no end mark, so it may be cut off") from None
            raise tarfile.ReadError(f"a header is damaged ({error}); the rest is lost") from None


class _Bounded:
    """The file of a tar, of which no more is read than a number of bytes that can be set: headers
    announce the size of their extensions, and can be chained."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.tell, self.seek, self.close = file.tell, file.seek, file.close
        self.left = MAX_HEADER_BYTES

    def read(self, size: int = -1) -> bytes:
        """Reads at most `size` bytes. Raises ReadError for more than what is left."""
        if not 0 <= size <= self.left:
            raise tarfile.ReadError(
                f"a header of {size} bytes or more, {MAX_HEADER_BYTES} are allowed"
            )
        self.left -= size
        return self._file.read(size)


def _open(file: BinaryIO) -> tarfile.TarFile:
    try:
        return tarfile.TarFile(fileobj=_Bounded(file), tarinfo=_Header)  # type: ignore[arg-type]
    except Exception as error:  # the library raises anything
        raise _damaged(error) from None


def _damaged(error: Exception) -> Exception:
    """Returns the error for what tarfile has raised: its own, or anything for a header that has no
    sense, such as ValueError, OverflowError and RecursionError."""
    if isinstance(error, FAULTS):
        return error
    reason = f"{type(error).__name__}: {str(error)[:MAX_SHOWN]}"
    return tarfile.ReadError(f"a header is damaged ({reason}); the rest is lost")


def _read_to_end(file: BinaryIO) -> None:
    """Reads what follows the tar, which compares the checksum of the whole. Raises OSError for
    damage, and for more content than MAX_BYTES_AFTER."""
    num_bytes = 0
    while piece := file.read(MAX_HEADER_BYTES):
        num_bytes += len(piece)
        if num_bytes > MAX_BYTES_AFTER:
            raise OSError(
                f"more than {MAX_BYTES_AFTER} bytes follow the end of the tar, so its checksum was "
                "not reached"
            )


@dataclass(slots=True)
class _Sample:
    """A sample while its members are read. Filled by _Samples only."""

    key: str
    values: dict[str, Any] = field(default_factory=dict)
    num_members: int = 0
    fault: RequestError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Media:
    """Which members are media, and how large one may be."""

    kinds: KindTable
    max_bytes: int

    def has(self, suffix: str) -> bool:
        """Returns whether a member with this suffix is media."""
        return self.kinds.of_name(f"x{suffix}") is not None

    def is_other(self, suffix: str, data: bytes) -> bool:
        """Returns whether a member that may be media is none by its first bytes."""
        if suffix.lower() not in BY_BYTES or self.kinds.of_name(f"x{suffix}") is not None:
            return False
        found = format_of(data[:HEAD])
        return found is None or found.kind not in self.kinds.kinds


class _Samples:
    """Groups the members of one tar. Used once."""

    def __init__(self, tar: tarfile.TarFile, shard: str, media: _Media, lines: Lines) -> None:
        self._tar, self._shard, self._lines = tar, shard, lines
        self._media = media
        assert isinstance(tar.fileobj, _Bounded)
        self._file = tar.fileobj

    def read(self, line: int) -> Iterator[Row | BadItem]:
        """Yields the samples, the first of which has the number `line`. Of those that are not
        wanted the headers are read only."""
        sample: _Sample | None = None
        while True:
            try:
                member = self._next()
            except FAULTS:
                if sample is not None:  # its members so far are whole
                    yield self._row(sample, line)
                raise
            if member is None:
                break
            folder, _, name = member.name.rpartition("/")
            stem, _, suffix = name.partition(".")
            if member.isdir() or not stem or META.match(member.name):
                continue
            key = f"{folder}/{stem}" if folder else stem
            if sample is not None and sample.key != key:
                yield self._row(sample, line)
                line += 1
                sample = None
            sample = sample or _Sample(key=key)
            self._add(sample, member, suffix, is_wanted=self._lines.takes(line))
        if sample is not None:
            yield self._row(sample, line)

    def _next(self) -> tarfile.TarInfo | None:
        """Returns the next member, None after the last one. Raises one of FAULTS."""
        self._file.left = MAX_HEADER_BYTES
        try:
            member = self._tar.next()
        except Exception as error:  # the library raises anything
            raise _damaged(error) from None
        self._tar.members.clear()  # type: ignore[attr-defined]  # or it keeps every header
        if member is not None and member.size < 0:  # it would lead back, and so for ever
            raise tarfile.ReadError(f"a header is damaged (a size of {member.size} bytes)")
        return member

    def _row(self, sample: _Sample, line: int) -> Row | BadItem:
        key = f"{self._shard}/{sample.key}"
        if sample.fault is not None:
            kind, code = type(sample.fault).__name__, sample.fault.code
            return BadItem(line=line, id=key, message=str(sample.fault), kind=kind, code=code)
        return Row(line=line, key=key, values={**sample.values, "__key__": sample.key})

    def _add(
        self, sample: _Sample, member: tarfile.TarInfo, suffix: str, *, is_wanted: bool
    ) -> None:
        """Reads a member into the sample, or notes what is wrong with it."""
        sample.num_members += 1
        last = f".{suffix.rpartition('.')[2].lower()}"
        if not is_wanted or sample.fault is not None:
            return
        try:
            is_media = self._media.has(f".{suffix}") or last in BY_BYTES
            _check(member, sample, self._media.max_bytes if is_media else MAX_TEXT_BYTES)
            if is_media or last in TEXT_SUFFIXES:
                data = self._data(member)
                if not self._media.is_other(last, data):
                    _put(sample.values, suffix, data, is_media=is_media)
        except RequestError as error:
            sample.fault = error

    def _data(self, member: tarfile.TarInfo) -> bytes:
        self._file.left = member.size  # it has been checked
        self._file.seek(member.offset_data)
        data = self._file.read(member.size)
        if len(data) < member.size:
            raise tarfile.ReadError(f"it ends inside of {member.name[:MAX_SHOWN]!r}")
        return data


def _check(member: tarfile.TarInfo, sample: _Sample, max_bytes: int) -> None:
    """Raises RequestError for a member that must not be read."""
    name = f"the member {member.name[:MAX_SHOWN]!r}"
    if not member.isreg() or member.issparse():
        raise RequestError(f"{name} is a link, a device or sparse; a shard must have plain files")
    if sample.num_members > MAX_MEMBERS:
        raise RequestError(f"the key has more than {MAX_MEMBERS} members")
    if member.size > max_bytes:
        raise MediaLimitError(
            f"{name} has {member.size} bytes, {max_bytes} are allowed; leave it out, or for media "
            "raise max_media_bytes"
        )


def _put(values: dict[str, Any], suffix: str, data: bytes, *, is_media: bool) -> None:
    """Adds the column of a member; the fields of a json become columns, unless there is one."""
    if is_media:
        values[suffix] = data
        return
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise RequestError(f"the {suffix} is {not_utf8(data)}") from None
    if not suffix.endswith("json"):
        values[suffix] = text.strip()
        return
    try:
        parsed = parse_json(text)
    except ValueError as error:
        raise RequestError(f"the json is not JSON: {str(error)[:MAX_SHOWN]}") from None
    fields = parsed if isinstance(parsed, dict) else {suffix: parsed}
    for name, value in fields.items():
        values.setdefault(name, value)
