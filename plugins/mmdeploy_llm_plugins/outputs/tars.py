"""WebDataset tars: one sample for each item, its members together.

    KEY.jpg    the original bytes of the item's first media, where they are at hand
    KEY.txt    the answer
    KEY.json   the record, and {"sample": {"key", "media", "left_out"}}

KEY is that of the source's sample where the input was a WebDataset, so that both can be joined;
else the id, or the name of the file. The JSON comes last: a sample without it was torn by an
interruption. Items that failed are in the folder __failed__, which `webdataset` skips, and have a
dot before their names, which `datasets` skips.
The configurations of the run are in global headers of the tar, which readers of files do not see. A
tar grows by whole samples.
"""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType
from typing import IO, Any

from mmdeploy_llm.data.outputs.public import (
    Blob,
    Drops,
    Entry,
    GrowingPart,
    LeftOutError,
    Limits,
    OpenMedia,
    PartFormat,
    Record,
    damaged,
)

MAX_ITEMS, MAX_BYTES = 10_000, 2**30
BLOCK, END = tarfile.BLOCKSIZE, bytes(2 * tarfile.BLOCKSIZE)
COPY_BYTES = 2**20
MAX_JSON = 2**28
FAILED = "__failed__/."
CONFIGURATIONS = "MMDEPLOY_LLM.configurations"
MAX_KEY_BYTES = 120  # of an id in a key
MAX_SOURCE_KEY = 1_000  # bytes
MAX_EXTENSION = 2**16  # bytes of a header's extension
# What a key of ours does not have: dots and slashes, which end it or begin a folder, and characters
# that print as nothing.
_NO_KEY = re.compile(r"[\x00-\x1f\x7f-\x9f./\\\s\ud800-\udfff]+")
_OF_SOURCE = re.compile(r".*\.(?:tar(?:\.gz|\.zst)?|tgz|tzst)/(.+)", re.IGNORECASE | re.DOTALL)
# As webdataset's base_plus_ext reads keys; a folder __x__ is skipped by its readers.
_SOURCE_KEY = re.compile(r"(?:[^/\x00-\x1f\x7f]+/)*[^/.\x00-\x1f\x7f]+")
_PATH = re.compile(rb"(?:^|(?<=\n))(\d{1,6}) path=")
_UNSAFE = re.compile(r"(?:^|/)(?:\.\.?|__[^/]*__)(?:/|$)|[\ud800-\udfff]")

# The columns of `datasets` that hold media.
_FEATURES = MappingProxyType({"image": "Image()", "audio": "Audio()", "video": "Video()"})
_TEXT, _BYTES = 'Value("string")', 'Value("binary")'


class TarParts(PartFormat):
    """Parts that are tars; see PartFormat."""

    open_suffix = ".tar"

    def __init__(self, most_items: int | None) -> None:
        self.limits = Limits(items=most_items or MAX_ITEMS, num_bytes=MAX_BYTES)
        self._keys: set[str] = set()  # of the tar that grows
        self._media: dict[str | None, str] = {}  # suffixes of media, None for no media: the kind

    def reader(self, file: IO[bytes], name: str, *, is_open: bool) -> TarReader:
        """Opens a tar."""
        return TarReader(file, name, is_open=is_open)

    def begin(self, file: GrowingPart, name: str, configurations: str | None) -> int:
        """Cuts off a torn sample, and the end of a tar that was about to be complete; adds the
        configurations. Returns the size."""
        with open(file.file.fileno(), "rb", closefd=False) as content:
            reader = TarReader(content, name, is_open=True)
            ends = [entry.end for entry in reader.entries()]  # or raises, when more is damaged
            self._keys = reader.keys
        file.keep(ends)
        if configurations is not None:
            values = {CONFIGURATIONS: configurations}
            file.write(tarfile.TarInfo.create_pax_global_header(values))
            file.commit()
        return file.size

    def append(self, file: GrowingPart, record: Record, media: OpenMedia) -> int:
        """Adds a sample."""
        begin = file.size
        key = self._free(record)
        sample: dict[str, Any] = {"key": key, "media": None, "left_out": None}
        if record.is_ok:
            try:
                with media() as blob:
                    if blob is not None:
                        sample["media"] = f"{key}.{blob.suffix}"
                        _add_blob(file, sample["media"], blob)
            except LeftOutError as error:
                file.roll_back()
                sample.update(media=None, left_out=str(error))
            self._note_media(record, sample["media"])
            _add(file, f"{key}.txt", record.text.encode("utf-8", "replace"))
        values = {**json.loads(record.to_json()), "sample": sample}
        name = f"{key}.json" if record.is_ok else f"{FAILED}{key}.json"
        _add(file, name, json.dumps(values, ensure_ascii=False).encode())
        self._keys.add(key)
        return file.commit() - begin

    def _note_media(self, record: Record, name: str | None) -> None:
        suffix = None if name is None else name.rpartition(".")[2]
        kind = next((own.kind for own in record.media), "image")
        self._media.setdefault(suffix, kind)

    def notes(self) -> tuple[str, ...]:
        """Says how `datasets` reads samples whose members are not alike: alone it looks at the
        first five, refuses those that differ, and drops later media of other suffixes."""
        if len(self._media) < 2:
            return ()
        columns = {own: _FEATURES.get(kind, _BYTES) for own, kind in self._media.items() if own}
        known = {"__key__": _TEXT, **columns, "txt": _TEXT}
        names = ", ".join(f'"{name}": {feature}' for name, feature in known.items())
        return (
            "the samples have media of several suffixes, or none: datasets reads all of them by "
            f"load_dataset(..., features=Features({{{names}}}))",
        )

    def _free(self, record: Record) -> str:
        """Returns a key that the tar does not have yet: of two items with one key the second, and
        of one that is done again the newer sample, has a digest."""
        key = key_of_sample(record)
        if key in self._keys:
            key = f"{key}-{record.item_digest[:8] or _digest(record.key)}"
        number, first = 1, key
        while key in self._keys:
            number += 1
            key = f"{first}-{number}"
        return key

    def seal(
        self,
        file: IO[bytes],
        name: str,
        new: Callable[[], IO[bytes]],
        configurations: str | None,
    ) -> bool:
        """Ends the tar, which becomes the part itself."""
        size = file.seek(0, os.SEEK_END)
        file.write(END + bytes(-(size + len(END)) % tarfile.RECORDSIZE))
        return False

    def copy_without(self, file: IO[bytes], drops: Drops, out: IO[bytes], *, is_open: bool) -> bool:
        """Copies everything but the dropped samples."""
        file.seek(0)
        kept = sum(1 for _ in TarReader(file, "a part", is_open=is_open).entries())
        size, begin = file.seek(0, os.SEEK_END), 0
        for first, end in [*drops, (size, size)]:
            file.seek(begin)
            _copy(file, out, first - begin)
            begin = end
        return kept > len(drops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A member of a tar. begin, end: of its content, with what fills the last block."""

    name: str
    type: bytes
    size: int
    begin: int
    end: int


class TarReader:
    """Reads the samples of a tar by their headers; the position of a sample is its first byte.

    keys: of the samples that `entries` has yielded.
    """

    def __init__(self, file: IO[bytes], name: str, *, is_open: bool) -> None:
        self._file, self._name, self._is_open = file, name, is_open
        self.keys: set[str] = set()

    def entries(self) -> Iterator[Entry]:
        """Yields the samples; skips a torn one at the end of a tar that grows, which a run that was
        killed has left: one that ends where the file does."""
        offset = begin = 0
        try:
            while (member := self._member(offset)) is not None:
                if member.type == tarfile.XGLTYPE:
                    begin = member.end
                elif member.name.endswith(".json"):
                    record = self._record(member)
                    self.keys.add(member.name.removeprefix(FAILED).removesuffix(".json"))
                    yield Entry(begin=begin, end=member.end, record=record)
                    begin = member.end
                offset = member.end
        except tarfile.HeaderError as error:
            if not self._is_open or self._has_more(offset):
                raise damaged(self._name, error) from None
        else:
            if self._has_more(offset):
                raise damaged(self._name, "something follows its end")

    def _has_more(self, offset: int) -> bool:
        """Whether the file has more than a torn sample from here on: a header that is whole and
        none, or anything after the zeros that end a tar."""
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(offset)
        block = self._file.read(BLOCK)
        if block.count(0) < len(block):
            return size - offset >= BLOCK and not _is_header(block)
        while piece := self._file.read(COPY_BYTES):
            if piece.count(0) < len(piece):
                return True
        return False

    def at(self, position: int) -> Record:
        """Returns the record of a sample."""
        try:
            offset = position
            while (member := self._member(offset)) is not None:
                if member.name.endswith(".json"):
                    return self._record(member)
                offset = member.end
        except tarfile.HeaderError as error:
            raise damaged(self._name, error) from None
        raise damaged(self._name, "a sample has no record")

    @contextmanager
    def media(self, position: int) -> Iterator[Blob | None]:
        """Opens the media of the sample that begins at a position."""
        member = self._member(position)
        if member is None or member.name.endswith((".txt", ".json")):
            yield None
            return
        self._file.seek(member.begin)
        yield Blob(file=self._file, size=member.size, suffix=member.name.rpartition(".")[2])

    def configurations(self) -> str | None:
        """Returns those in the first global header; None if it is torn, as `entries` tells."""
        self._file.seek(0)
        try:
            with tarfile.open(fileobj=self._file, mode="r:") as tar:
                tar.next()
                return tar.pax_headers.get(CONFIGURATIONS)
        except tarfile.ReadError:
            return None

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _header(self, offset: int) -> tarfile.TarInfo | None:
        """Returns the header at an offset, None at the end. Raises HeaderError where it is torn."""
        self._file.seek(offset)
        block = self._file.read(BLOCK)
        if (not block and self._is_open) or block.count(0) == BLOCK:
            return None
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")

    def _member(self, offset: int) -> Member | None:
        """Returns the member whose header, or that header's extension with a long or foreign name,
        is at an offset; None at the end. Raises HeaderError where it is torn."""
        name: str | None = None
        while (info := self._header(offset)) is not None:
            begin = offset + BLOCK
            end = begin + _padded(info.size)
            if info.type != tarfile.XHDTYPE:
                own = info.name if name is None else name
                return Member(name=own, type=info.type, size=info.size, begin=begin, end=end)
            if name is not None or info.size > MAX_EXTENSION:
                raise tarfile.HeaderError("a header has too many extensions")
            name, offset = self._name_in(begin, info.size), end
        if name is not None:
            raise tarfile.HeaderError("a header is cut off")
        return None

    def _name_in(self, begin: int, size: int) -> str:
        """Returns the name in an extension: lines "LENGTH path=NAME"."""
        self._file.seek(begin)
        body = self._file.read(size)
        found = _PATH.search(body)
        if len(body) < size or found is None:
            raise tarfile.HeaderError("the extension of a header is cut off, or has no name")
        length = int(found[1]) - len(found[0])
        return body[found.end() : found.end() + length - 1].decode("utf-8", "surrogateescape")

    def _record(self, member: Member) -> Record:
        if member.size > MAX_JSON:
            raise damaged(self._name, f"{member.name!r} has {member.size} bytes")
        self._file.seek(member.begin)
        body = self._file.read(member.end - member.begin)
        if len(body) < member.end - member.begin:
            raise tarfile.HeaderError(f"{member.name!r} is cut off")
        try:
            values = json.loads(body[: member.size])
            values.pop("sample")
            return Record.from_values(values)
        except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
            raise damaged(
                self._name, f"{member.name!r} is not a record of a batch ({error})"
            ) from None


def key_of_sample(record: Record) -> str:
    """Returns the key of a record's sample: that of the source's sample, or its id in characters
    that keys may have, with a digest when others were replaced."""
    own = record.key
    source = _OF_SOURCE.fullmatch(own) if record.path is None else None
    if source is not None and _is_key(source[1]):
        return source[1]
    name = os.path.basename(os.path.splitext(own)[0]) if record.path is not None else own
    key = _cut(_NO_KEY.sub("_", name))
    is_own = key == own and not _UNSAFE.search(key)
    return key if is_own else f"{key.strip('_') or 'item'}-{_digest(own)}"


def _is_key(key: str) -> bool:
    is_short = len(key.encode(errors="surrogatepass")) <= MAX_SOURCE_KEY
    return is_short and bool(_SOURCE_KEY.fullmatch(key)) and not _UNSAFE.search(key)


def _cut(key: str) -> str:
    return key.encode()[:MAX_KEY_BYTES].decode(errors="ignore")


def _digest(key: str) -> str:
    return blake2b(key.encode(errors="surrogatepass"), digest_size=6).hexdigest()


def _add(file: GrowingPart, name: str, data: bytes) -> None:
    file.write(_info(name, len(data)) + data + bytes(-len(data) % BLOCK))


def _add_blob(file: GrowingPart, name: str, blob: Blob) -> None:
    file.write(_info(name, blob.size))
    left = blob.size
    while left:
        try:
            piece = blob.file.read(min(left, COPY_BYTES))
        except OSError as error:
            raise LeftOutError(f"it cannot be read: {error}") from None
        if not piece:
            raise LeftOutError("it is shorter than it was")
        file.write(piece)
        left -= len(piece)
    file.write(bytes(-blob.size % BLOCK))


def _is_header(block: bytes) -> bool:
    try:
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def _info(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.PAX_FORMAT)  # a long or foreign name has an extension


def _padded(size: int) -> int:
    return size + -size % BLOCK


def _copy(file: IO[bytes], out: IO[bytes], size: int) -> None:
    while size > 0:
        piece = file.read(min(size, COPY_BYTES))
        if not piece:
            raise OSError("a part is shorter than it was")
        out.write(piece)
        size -= len(piece)
