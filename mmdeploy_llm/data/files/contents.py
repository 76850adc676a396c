"""Contents: digests of what an item asks about, with the content of its media in place of their
names, so that items which ask the same of the same picture are found."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from dataclasses import asdict
from hashlib import blake2b
from typing import Any, Literal, Protocol, get_args

from mmdeploy_llm.data.records.identity import digest_of, file_paths
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.rows.names import is_url
from mmdeploy_llm.engine.intake.prompts import with_changed_media
from mmdeploy_llm.errors import ConfigError, RequestError
from mmdeploy_llm.messages import MediaItem, MediaRef
from mmdeploy_llm.system.portable.files import NO_WAIT
from mmdeploy_llm.values.prompt import PromptParts

Dedupe = Literal["bytes", "pixels"]
PIECE_BYTES = 2**20


class Reader(Protocol):
    """The method of intake's MediaLoader that digests of pixels need."""

    def previews(self, item: MediaItem, maker: Any = None) -> Any:
        """Returns what the maker makes of a media item, see MediaLoader.previews."""


class _NotComparable(Exception):
    """The item has media whose content cannot be known."""


def check_dedupe(how: str | None) -> None:
    """Raises ConfigError for an unknown choice."""
    if how is not None and how not in get_args(Dedupe):
        raise ConfigError(f"dedupe must be one of {', '.join(get_args(Dedupe))}, got {how[:40]!r}")


class Contents:
    """Makes digests of items. Thread-safe.

    how: "bytes" compares files, "pixels" what images show. open_reader: returns what reads images
    within the engine's limits; called once.
    """

    def __init__(self, how: str, open_reader: Callable[[], Reader]) -> None:
        from mmdeploy_llm.media.image.thumbnail import PixelDigests

        self._how, self._open_reader = how, open_reader
        self._maker = PixelDigests()
        self._lock = threading.Lock()
        self._reader: Reader | None = None

    def of(self, item: Item) -> str:
        """Returns the digest of what an item asks; "" where it has media that cannot be compared:
        URLs, objects of a program, and files that cannot be read."""
        prompts = {question.name: question.prompt for question in item.questions}
        asked = _Asked(self)
        try:
            found = [asked.of_prompt(prompt) for prompt in (item.prompt, *prompts.values())]
        except _NotComparable:
            return ""
        params = item.params.model_dump(mode="json", exclude_defaults=True)
        return digest_of(found, [*prompts], params)

    def of_media(self, kind: str, value: Any) -> str:
        """Returns the digest of one media item. Raises _NotComparable."""
        if kind == "image" and self._how == "pixels" and isinstance(value, (str, bytes)):
            digest = self._pixels(value)
            if digest is not None:
                return digest
        return _digest_of_bytes(value)

    def _pixels(self, value: str | bytes) -> str | None:
        """Returns the digest of the pixels; None for an image that cannot be read."""
        with self._lock:
            if self._reader is None:
                self._reader = self._open_reader()
        source: Any = MediaRef(kind="image", uri=value) if isinstance(value, str) else value
        try:
            made = self._reader.previews(
                MediaItem(kind="image", source=source, options={}), self._maker
            )
        except RequestError:
            return None
        return f"pixels {bytes(made[0]).decode()}"


class _Asked:
    """Replaces the media of an item's prompts by their digests, each file read once."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._known: dict[tuple[str, str], str] = {}

    def of_prompt(self, prompt: PromptParts) -> dict[str, Any]:
        """Returns the values of a prompt with digests for media."""
        return asdict(with_changed_media(prompt, self._digest))

    def _digest(self, item: MediaItem) -> str:
        value = os.fspath(item.source) if isinstance(item.source, os.PathLike) else item.source
        if not isinstance(value, str):
            return self._contents.of_media(item.kind, value)
        if (item.kind, value) not in self._known:
            self._known[item.kind, value] = self._contents.of_media(item.kind, value)
        return self._known[item.kind, value]


def _digest_of_bytes(value: Any) -> str:
    """Returns the digest of encoded media: a file, bytes, or a data: URL."""
    digest = blake2b(digest_size=20)
    if isinstance(value, (bytes, bytearray, memoryview)):
        digest.update(value)
    elif not isinstance(value, str):
        raise _NotComparable
    elif value[:5].lower() == "data:":
        digest.update(value.encode("utf-8", "surrogatepass"))
    else:
        paths = file_paths(value)
        if is_url(value) and not paths:
            raise _NotComparable
        _feed_file(digest.update, paths[0] if paths else value)
    return f"bytes {digest.hexdigest()}"


def _feed_file(update: Callable[[bytes], Any], path: str) -> None:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise _NotComparable
        with open(os.open(path, os.O_RDONLY | NO_WAIT), "rb", buffering=0) as file:
            while piece := file.read(PIECE_BYTES):
                update(piece)
    except (OSError, ValueError):
        raise _NotComparable from None
