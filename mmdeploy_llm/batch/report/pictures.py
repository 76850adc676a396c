"""Stores the pictures and clips of a report: embedded in the page, or in files beside it."""

from __future__ import annotations

import base64
import os
import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol
from urllib.parse import quote

from mmdeploy_llm.data.records.files import Folder, OutputLostError
from mmdeploy_llm.data.records.item import Media
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.records.unicode_text import without_surrogates
from mmdeploy_llm.values.first_bytes import HEAD, format_of

from .letters import without_bidi_controls
from .previews import FilePreviews, MakePreviews, is_refused, media_of

NAME_BYTES = 12
FOLDER = "pictures"
# What previews are: pictures, and clips of sounds. By the bytes they begin with.
JPEG, MP3 = "jpg", "mp3"
TYPES = {JPEG: "image/jpeg", MP3: "audio/mpeg"}
_OURS = re.compile(rf"[0-9a-f]{{{2 * NAME_BYTES}}}-\d{{3,}}\.(?:jpg|mp3)")
# The source of a preview in a file, in a card's HTML.
_IN_FILES = re.compile(rf'src="[^"]*/{FOLDER}/[0-9a-f]{{2}}/({_OURS.pattern})"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture or a clip on a page. source: URL for an img or audio element. name: its alternative
    text. form: JPEG or MP3."""

    source: str
    name: str
    form: str = JPEG


class Pictures(Protocol):
    """Provides the pictures of a media item. Called from several threads at once.

    data: the bytes of the item, where they are here; they need not be read again then.
    """

    def of(self, media: Media, data: bytes | None = None) -> tuple[Picture, ...]:
        """Returns one picture of an image, several of a video, none without a preview."""

    def have(self, html: str) -> bool:
        """Returns whether all pictures that a card of an earlier page shows are there."""


class EmbeddedPictures:
    """Embeds pictures as data: URLs, so that the page is a single file."""

    def __init__(self, make: MakePreviews) -> None:
        self._make = make

    def of(self, media: Media, data: bytes | None = None) -> tuple[Picture, ...]:
        """Makes the pictures anew at each call."""
        blobs = _made(self._make, media, data)
        return _named(media, (_data_url(blob) for blob in blobs), [_form(blob) for blob in blobs])

    def have(self, html: str) -> bool:
        """Returns whether the card needs no files."""
        return _IN_FILES.search(html) is None


class PicturesInFiles:
    """Writes pictures to files below `folder`, named by a hash of the original's path, size and
    modification time, so that pictures of an earlier report are reused.

    url: URL of the folder relative to the page.
    rules: part of the hash; pictures made under other rules are not reused.
    """

    def __init__(self, make: MakePreviews, folder: Folder, url: str, rules: str = "") -> None:
        self._make = make
        self._rules = rules
        self._folder = folder.inner(FOLDER)
        self._url = f"{url}/{FOLDER}"
        self._names: set[str] = set()
        self._found: dict[str, list[str]] = {}  # stem -> names of earlier pictures
        for _, name in _pictures_in(self._folder):
            self._found.setdefault(name.rpartition("-")[0], []).append(name)

    def of(self, media: Media, data: bytes | None = None) -> tuple[Picture, ...]:
        """Returns the pictures, written atomically when no earlier report has them."""
        stem = _stem(media, self._rules) if data is None else _stem_of(data, self._rules)
        if stem is None:
            return ()
        names = self._found.get(stem) or self._write(stem, _made(self._make, media, data))
        self._names.update(names)
        forms = [name.rpartition(".")[2] for name in names]
        return _named(media, (f"{self._url}/{stem[:2]}/{name}" for name in names), forms)

    def have(self, html: str) -> bool:
        """Returns whether the files of the card's pictures are there."""
        return all(
            name in self._names or name in self._found.get(name.rpartition("-")[0], ())
            for name in _IN_FILES.findall(html)
        )

    def keep(self, html: str) -> None:
        """Keeps the files of a card that an earlier page or the run has made."""
        self._names.update(_IN_FILES.findall(html))

    def finish(self) -> None:
        """Removes the pictures of earlier reports that this one does not show. Raises
        OutputLostError when pictures that it shows are missing."""
        remove_pictures(self._folder, self._names)
        missing = self._names.difference(name for _, name in _pictures_in(self._folder))
        self._folder.check_in_place()
        if missing:
            raise OutputLostError(
                f"{len(missing)} pictures in {str(self._folder.path)!r} were removed while the "
                "report was written; write it again"
            )

    def close(self) -> None:
        """Closes the folder."""
        self._folder.close()

    def _write(self, stem: str, blobs: Sequence[bytes]) -> list[str]:
        names = [f"{stem}-{number:03d}.{_form(blob)}" for number, blob in enumerate(blobs)]
        if not names:
            return []
        with self._folder.inner(stem[:2]) as folder:
            for name, blob in zip(names, blobs, strict=True):
                # A name of its own: another thread may write the same picture.
                partial = f"{name}.{secrets.token_hex(4)}.partial"
                folder.write(name, [blob], partial, is_synced=False)
        return names


def remove_pictures(folder: Folder, kept: Collection[str] = ()) -> None:
    """Removes all pictures of earlier reports but those in `kept`; follows no link."""
    for inner, name in _pictures_in(folder):
        if name not in kept:
            inner.remove(name)


def _pictures_in(folder: Folder) -> Iterator[tuple[Folder, str]]:
    """Yields the pictures that reports have written: browsers that save a page keep pictures of
    other names in a folder of the same name."""
    for short in folder.names():
        inner = folder.existing(short) if len(short) == 2 else None
        if inner is not None:
            with inner:
                for name in filter(_OURS.fullmatch, inner.names()):
                    if name.startswith(short):
                        yield inner, name


def _made(make: MakePreviews, media: Media, data: bytes | None) -> Sequence[bytes]:
    if data is None:
        return make(media)
    return make.of(media, data) if isinstance(make, FilePreviews) else ()


def _stem_of(data: bytes, rules: str) -> str:
    """Returns a file name stem for the pictures of these bytes."""
    digest = blake2b(data, digest_size=NAME_BYTES, key=blake2b(rules.encode()).digest())
    return digest.hexdigest()


def _stem(media: Media, rules: str) -> str | None:
    """Returns a file name stem for the pictures of the current version of a file, or None when
    the file does not exist."""
    try:
        state = os.stat(media.name) if media.is_file else None
    except (OSError, ValueError):  # ValueError: characters that no file name has
        return None
    if state is None:
        return None
    file = f"{media.name}\0{media.pages}\0{state.st_size}\0{state.st_mtime_ns}"
    text = f"{media.kind}\0{file}\0{rules}"
    return blake2b(text.encode(errors="surrogatepass"), digest_size=NAME_BYTES).hexdigest()


def _data_url(blob: bytes) -> str:
    return f"data:{TYPES[_form(blob)]};base64,{base64.b64encode(blob).decode('ascii')}"


def _form(blob: bytes) -> str:
    found = format_of(blob[:HEAD])
    return MP3 if found and found.kind == "audio" else JPEG


def _named(media: Media, sources: Iterable[str], forms: Sequence[str]) -> tuple[Picture, ...]:
    name = printable(os.path.basename(media.name))
    noun = "frame" if media.kind == "video" else "part"
    many = [f"{name}, {noun} {number}" for number in range(1, len(forms) + 1)]
    return tuple(
        Picture(source=source, name=label, form=form)
        for source, label, form in zip(
            sources, [name] if len(forms) == 1 else many, forms, strict=True
        )
    )


def printable(text: str) -> str:
    """Replaces bidirectional controls and lone surrogates: file names may hold bytes that are not
    valid UTF-8."""
    return without_bidi_controls(without_surrogates(text))


def url_of(name: str) -> str:
    """Returns the URL of a folder of this name relative to a page beside it."""
    return quote(os.fsencode(name))


MAX_START = 160  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Near:
    """A record, and how near it is to the first one of its strip; None: it is the first."""

    record: Record
    score: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Thumb:
    """An item in a strip. source: URL of its picture, "" without one. text: the start of its
    text."""

    name: str
    title: str
    source: str
    text: str
    score: float | None


Strips = Sequence[Sequence[Near]]


def thumbs_of(strips: Strips, pictures: Pictures, roots: Collection[str] = ()) -> list[list[Thumb]]:
    """Returns strips with their pictures. roots: see media_of."""
    return [[_thumb(own, pictures, roots) for own in strip] for strip in strips]


def _thumb(own: Near, pictures: Pictures, roots: Collection[str]) -> Thumb:
    record = own.record
    shown = () if is_refused(record) else media_of(record, roots)
    found = [each for media in shown for each in pictures.of(media) if each.form == JPEG]
    title = printable(record.key if record.path is None else record.path)
    return Thumb(
        name=os.path.basename(title),
        title=title,
        source=found[0].source if found else "",
        text=" ".join((record.prompt or "").split())[:MAX_START],
        score=own.score,
    )
