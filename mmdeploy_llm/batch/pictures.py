"""Where the pictures of a report go: into the page itself, or into files beside it."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from .items import Media
from .previews import MakePreviews

NAME_BYTES = 12
FOLDER = "pictures"


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One picture on a page. source: what an img element shows. name: for those who do not see
    it."""

    source: str
    name: str


class Pictures(Protocol):
    """Makes the pictures of a media item. May be called in several threads at once."""

    def of(self, media: Media) -> tuple[Picture, ...]:
        """One of an image, several of a video, none where there is no preview."""


class EmbeddedPictures:
    """Pictures as data: URLs, so that the page is all in one file."""

    def __init__(self, make: MakePreviews) -> None:
        self._make = make

    def of(self, media: Media) -> tuple[Picture, ...]:
        """Made anew each time."""
        blobs = self._make(media)
        return _named(media, (_data_url(blob) for blob in blobs))


class PicturesInFiles:
    """Pictures as files below `folder`, named after the original's path, size and time of change:
    those of an earlier report are taken as they are.

    url: the folder as the page names it.
    """

    def __init__(self, make: MakePreviews, folder: Path, url: str) -> None:
        self._make = make
        self._folder = folder / FOLDER
        self._url = f"{url}/{FOLDER}"
        self._names: set[str] = set()
        self._found: dict[str, list[str]] = {}  # stem -> names of earlier pictures
        for path in sorted(self._folder.glob("??/*.jpg")):
            self._found.setdefault(path.stem.rpartition("-")[0], []).append(path.name)

    def of(self, media: Media) -> tuple[Picture, ...]:
        """Made when there is no file yet; put in place in one move."""
        stem = _stem(media)
        if stem is None:
            return ()
        place = self._folder / stem[:2]
        names = self._found.get(stem) or [
            self._write(place, f"{stem}-{number:03d}.jpg", blob)
            for number, blob in enumerate(self._make(media))
        ]
        self._names.update(names)
        return _named(media, (f"{self._url}/{stem[:2]}/{name}" for name in names))

    def remove_others(self) -> None:
        """Removes the pictures of earlier reports that this one does not show."""
        for path in self._folder.glob("??/*.jpg"):
            if path.name not in self._names:
                path.unlink(missing_ok=True)

    def _write(self, place: Path, name: str, blob: bytes) -> str:
        place.mkdir(parents=True, exist_ok=True)
        partial = place / f"{name}.{os.getpid()}.partial"
        partial.write_bytes(blob)
        os.replace(partial, place / name)
        return name


def _stem(media: Media) -> str | None:
    """A name for the pictures of a file as it is now; None when there is no such file."""
    try:
        state = os.stat(media.name) if media.is_file else None
    except OSError:
        return None
    if state is None:
        return None
    text = f"{media.kind}\0{media.name}\0{state.st_size}\0{state.st_mtime_ns}"
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
    """File names can hold bytes that are no text."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def url_of(folder: Path) -> str:
    """The last part of a path as a page beside it names it."""
    return quote(os.fsencode(folder.name))
