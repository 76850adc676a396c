"""Stores the pictures of a report: embedded in the page, or in files beside it."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from .bidi import without_bidi_controls
from .items import Media
from .previews import MakePreviews

NAME_BYTES = 12
FOLDER = "pictures"


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One picture on a page. source: URL for an img element. name: its alternative text."""

    source: str
    name: str


class Pictures(Protocol):
    """Provides the pictures of a media item. Called from several threads at once."""

    def of(self, media: Media) -> tuple[Picture, ...]:
        """Returns one picture of an image, several of a video, none without a preview."""


class EmbeddedPictures:
    """Embeds pictures as data: URLs, so that the page is a single file."""

    def __init__(self, make: MakePreviews) -> None:
        self._make = make

    def of(self, media: Media) -> tuple[Picture, ...]:
        """Makes the pictures anew at each call."""
        blobs = self._make(media)
        return _named(media, (_data_url(blob) for blob in blobs))


class PicturesInFiles:
    """Writes pictures to files below `folder`, named by a hash of the original's path, size and
    modification time, so that pictures of an earlier report are reused.

    url: URL of the folder relative to the page.
    rules: part of the hash; pictures made under other rules are not reused.
    """

    def __init__(self, make: MakePreviews, folder: Path, url: str, rules: str = "") -> None:
        self._make = make
        self._rules = rules
        self._folder = folder / FOLDER
        self._url = f"{url}/{FOLDER}"
        self._names: set[str] = set()
        self._found: dict[str, list[str]] = {}  # stem -> names of earlier pictures
        for path in sorted(self._folder.glob("??/*.jpg")):
            self._found.setdefault(path.stem.rpartition("-")[0], []).append(path.name)

    def of(self, media: Media) -> tuple[Picture, ...]:
        """Returns the pictures, written atomically when no earlier report has them."""
        stem = _stem(media, self._rules)
        if stem is None:
            return ()
        folder = self._folder / stem[:2]
        names = self._found.get(stem) or [
            self._write(folder, f"{stem}-{number:03d}.jpg", blob)
            for number, blob in enumerate(self._make(media))
        ]
        self._names.update(names)
        return _named(media, (f"{self._url}/{stem[:2]}/{name}" for name in names))

    def remove_others(self) -> None:
        """Removes the pictures of earlier reports that this one does not show."""
        for path in self._folder.glob("??/*.jpg"):
            if path.name not in self._names:
                path.unlink(missing_ok=True)

    def _write(self, folder: Path, name: str, blob: bytes) -> str:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{name}.{os.getpid()}.partial"
        partial.write_bytes(blob)
        os.replace(partial, folder / name)
        return name


def _stem(media: Media, rules: str) -> str | None:
    """Returns a file name stem for the pictures of the current version of a file, or None when
    the file does not exist."""
    try:
        state = os.stat(media.name) if media.is_file else None
    except OSError:
        return None
    if state is None:
        return None
    text = f"{media.kind}\0{media.name}\0{state.st_size}\0{state.st_mtime_ns}\0{rules}"
    return blake2b(text.encode(errors="surrogatepass"), digest_size=NAME_BYTES).hexdigest()


def _data_url(blob: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(blob).decode('ascii')}"


def _named(media: Media, sources: Iterable[str]) -> tuple[Picture, ...]:
    name = printable(os.path.basename(media.name))
    found = list(sources)
    labels = [name] if len(found) == 1 else [f"{name}, frame {n}" for n in range(1, len(found) + 1)]
    return tuple(
        Picture(source=source, name=label) for source, label in zip(found, labels, strict=True)
    )


def printable(text: str) -> str:
    """Replaces bidirectional controls and surrogate escapes: file names may hold bytes that are not
    valid UTF-8."""
    text = text.encode(errors="surrogateescape").decode(errors="replace")
    return without_bidi_controls(text)


def url_of(folder: Path) -> str:
    """Returns the URL of a folder relative to a page beside it."""
    return quote(os.fsencode(folder.name))
