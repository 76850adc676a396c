"""The media that a WebDataset sample holds: the original bytes of an item's first media."""

from __future__ import annotations

import base64
import binascii
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import IO, Any
from urllib.parse import unquote_to_bytes

from mmdeploy_llm.data.records.identity import file_paths
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.rows.names import is_url
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.messages import MediaRef
from mmdeploy_llm.system.portable import files
from mmdeploy_llm.values.first_bytes import HEAD, format_of

MAX_BYTES = 2**31
MAX_SUFFIX = 8  # characters of a suffix that a name keeps


class LeftOutError(Exception):
    """The media cannot be stored; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """Bytes to store. suffix: what they are, such as "jpg"."""

    file: IO[bytes]
    size: int
    suffix: str


OpenMedia = Callable[[], AbstractContextManager[Blob | None]]


@contextmanager
def first_media(item: Item | BadItem | None) -> Iterator[Blob | None]:
    """Opens the first media of an item; None without any. Raises LeftOutError for a URL, an object
    of a program, and a file that cannot be read any more."""
    value = _first(item)
    if value is None:
        yield None
        return
    file = _opened(value)
    with file:
        size = _size(file)
        head = file.read(HEAD)
        file.seek(0)
        yield Blob(file=file, size=size, suffix=_suffix(head, value))


def _first(item: Item | BadItem | None) -> Any:
    if not isinstance(item, Item):
        return None
    if item.path is not None:
        return item.path
    return next((value for value in media_in(item) if value is not None), None)


def media_in(item: Item) -> Iterator[Any]:
    """Yields the media that an item's prompt holds, without their options, in the order of
    `item.media`."""
    kinds = {own.kind for own in item.media}
    for own in item.prompt.items:
        if not kinds or own.kind in kinds:
            yield own.source.uri if isinstance(own.source, MediaRef) else own.source


def _opened(value: Any) -> IO[bytes]:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return BytesIO(value)
    if not isinstance(value, (str, os.PathLike)):
        raise LeftOutError(f"it is an object of the program, a {type(value).__name__}")
    name = os.fspath(value)
    if name[:5].lower() == "data:":
        return BytesIO(_data(name))
    paths = file_paths(name)
    if is_url(name) and not paths:
        raise LeftOutError("it is a URL")
    try:
        # O_NONBLOCK: a FIFO must not wait.
        fd = os.open(paths[0] if paths else name, os.O_RDONLY | files.NO_WAIT)
    except (OSError, ValueError) as error:
        raise LeftOutError(f"it cannot be read: {error}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise LeftOutError("it is not a regular file")
    return open(fd, "rb")


def _data(url: str) -> bytes:
    head, _, body = url.partition(",")
    raw = unquote_to_bytes(body)
    if not head.lower().endswith(";base64"):
        return raw
    try:
        return base64.b64decode(raw)
    except binascii.Error:
        raise LeftOutError("its data: URL is damaged") from None


def _size(file: IO[bytes]) -> int:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if size > MAX_BYTES:
        raise LeftOutError(f"it has {size} bytes, and {MAX_BYTES} are allowed in a sample")
    return size


def _suffix(head: bytes, value: Any) -> str:
    """Returns what the bytes are; where that is not known, the suffix of the name, or "bin"."""
    name = os.fspath(value) if isinstance(value, (str, os.PathLike)) else ""
    own = os.path.splitext(name)[1].lower().removeprefix(".") if not is_url(str(name)) else ""
    found = format_of(head)
    if found is not None and found.suffixes:
        return own if own in found.suffixes else found.suffixes[0]
    # A suffix of ours would hide the answer.
    is_plain = (
        own.isascii() and own.isalnum() and len(own) <= MAX_SUFFIX and own not in ("json", "txt")
    )
    return own if is_plain and own else "bin"
