"""Checks of media processors and splitters: that no file which an item names is read from outside
the root, nor anything from the web.

A file is known to be read when the result changes with its content.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image

from mmdeploy_llm.hooks import MediaInput, MediaLimits, SplitPart
from mmdeploy_llm.hooks.records import FAULTS
from mmdeploy_llm.media import DecodedImage, Drawing
from mmdeploy_llm.testing.models.base import Check, CheckSkipped, demand, since
from mmdeploy_llm.testing.plugins.web import Web

from . import samples as generated
from .keys import difference
from .samples import image_bytes, pixels
from .splitter_subject import SplitterSubject, drawn
from .subject import ProcessorSubject

SHOWN_SIDE = 48  # pixels of a side of what is drawn to be compared
MOST_BYTES = 2**20  # of a text in which names are looked for
MOST_FILES = 8  # of a folder, in which names are looked for
# Names of files in a text, such as a list of pictures; the part before the colon is of a URL.
NAMES = re.compile(
    rb"(?:[a-z]+:)?[\w%./\\~-]+\.(?:png|jpe?g|gif|webp|bmp|tiff?|svg|wav|mp3|flac|ogg|mp4|mkv|txt)\b",
    re.IGNORECASE,
)
LINKS = re.compile(rb"(\s(?:xlink:)?(?:href|src|file|path|url|source)\s*=\s*)([\"'])[^\"'#]*\2")
TAG = re.compile(rb"<[A-Za-z][\w:.-]*(?:\s[^<>]*[^/<>])?>")
PICTURE = (
    '<image xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" x="0" '
    'y="0" width="999" height="999" preserveAspectRatio="none" href="{to}" xlink:href="{to}"/>'
)
SHOWN_TEXT = '<text xmlns="http://www.w3.org/2000/svg" x="1" y="20" font-size="20">&kit;</text>'
PLAYLISTS = {
    "a playlist (HLS)": "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:1,\n{to}\n#EXT-X-ENDLIST\n",
    "a list of files (ffconcat)": "ffconcat version 1.0\nfile '{to}'\n",
}
ADVICE = "read nothing that a file names, or only what is beneath limits.allowed_root"

Contents = tuple[bytes, bytes]
# Returns what a source becomes with these limits, as something to be compared; None: it is refused.
Process = Callable[[Any, MediaLimits], Any]
# Puts a content into a root; returns the source that then has it, and where its names begin.
Place = Callable[[bytes, Path], tuple[Any, Path]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Linked:
    """A file that names another. make: returns it for the name. contents: of the other file, with
    which it must become the same. suffix: of the other file. num_names: of its names, those that
    are tried: path, URI and relative path. is_path: whether it is no URL."""

    what: str
    make: Callable[[str], bytes]
    contents: Contents
    suffix: str = ".png"
    num_names: int = 3
    is_path: bool = False


def linked(kind: str, blob: bytes) -> Iterator[Linked]:
    """Yields files that name another one, made of a sample where it is a text or an archive."""
    one, two = (image_bytes(pixels(40, 60, seed=seed), "PNG") for seed in (21, 22))
    pictures = one, two
    if b"\0" not in blob and len(blob) < MOST_BYTES:
        yield from _of_texts(blob, pictures)
    yield from _of_archives(blob, pictures)
    if kind in ("audio", "video"):
        made = [own for own in generated.samples(kind).values() if isinstance(own, bytes)]
        suffix = ".wav" if kind == "audio" else ".mp4"
        for what, text in PLAYLISTS.items():
            make = lambda to, text=text: text.format(to=to).encode()  # noqa: E731
            yield Linked(
                what=what, make=make, contents=(made[0], made[1]), suffix=suffix, num_names=1
            )


def _of_texts(blob: bytes, contents: Contents) -> Iterator[Linked]:
    if NAMES.search(blob):
        make = lambda to: NAMES.sub(lambda _: to.encode(), blob)  # noqa: E731
        yield Linked(what="the names in it replaced", make=make, contents=contents)
    if LINKS.search(blob):
        quoted = lambda to: LINKS.sub(lambda m: m[1] + m[2] + to.encode() + m[2], blob)  # noqa: E731
        yield Linked(what="the links in it replaced", make=quoted, contents=contents)
    first, (body, mark, end) = TAG.search(blob), blob.rpartition(b"</")
    if first is None or not mark:
        return
    yield Linked(
        what="a picture added",
        make=lambda to: body + PICTURE.format(to=to).encode() + mark + end,
        contents=contents,
    )
    if b"<!DOCTYPE" not in blob:
        name = re.split(rb"[\s>]", first[0][1:])[0].decode()
        at = first.start()

        def with_entity(to: str) -> bytes:
            head = f'<!DOCTYPE {name} [<!ENTITY kit SYSTEM "{to}">]>'.encode()
            return blob[:at] + head + body[at:] + SHOWN_TEXT.encode() + mark + end

        words = (b"MMMMMM", b"ii")
        yield Linked(what="an entity added", make=with_entity, contents=words, suffix=".txt")


def _of_archives(blob: bytes, contents: Contents) -> Iterator[Linked]:
    """Yields the archive with a link in the place of its first file."""
    try:
        with tarfile.open(fileobj=io.BytesIO(blob)) as archive:
            members = [(it, archive.extractfile(it)) for it in archive if it.isreg()]
            files = [(it, b"" if file is None else file.read()) for it, file in members]
    except (tarfile.TarError, EOFError, OSError, ValueError):
        return
    if not files:
        return
    for what, kind in (("a link", tarfile.SYMTYPE), ("a hard link", tarfile.LNKTYPE)):

        def make(to: str, kind: bytes = kind) -> bytes:
            made = io.BytesIO()
            with tarfile.open(fileobj=made, mode="w", encoding="utf-8") as archive:
                for number, (member, content) in enumerate(files):
                    info = tarfile.TarInfo(member.name)
                    if number:
                        info.size = len(content)
                    else:
                        info.type, info.linkname = kind, to
                    archive.addfile(info, None if not number else io.BytesIO(content))
            return made.getvalue()

        own = (files[0][1], contents[0])
        yield Linked(what=f"{what} in it", make=make, contents=own, num_names=1, is_path=True)


def demand_unread(
    kind: str, sources: Mapping[str, Any], process: Process, own: MediaLimits
) -> None:
    """Demands that no file outside of the root has an effect on what items become, and that no
    server is asked. Raises CheckSkipped for items that cannot name a file."""
    is_checked = False
    for name, source in sources.items():
        for where, blob, place in _texts_of(source):
            for each in linked(kind, blob):
                is_checked = True
                what = f"sample {name!r}{where} with {each.what}"
                _demand_unread(what, each, place, process, own)
    if not is_checked:
        raise CheckSkipped("no sample is a text or an archive, which may name another file")


def _texts_of(source: Any) -> Iterator[tuple[str, bytes, Place]]:
    """Yields what may name files in a source: where it is in it, its content, and what puts another
    one in its place."""
    if isinstance(source, bytes):
        yield "", source, lambda blob, root: (blob, Path.cwd())
    elif isinstance(source, Path) and source.is_file():
        yield "", source.read_bytes(), lambda blob, root: _written(root / source.name, blob)
    elif isinstance(source, Path):
        for file in islice((it for it in sorted(source.rglob("*")) if it.is_file()), MOST_FILES):
            inside = file.relative_to(source)

            def place(blob: bytes, root: Path, inside: Path = inside) -> tuple[Path, Path]:
                folder = root / source.name
                shutil.copytree(source, folder, dirs_exist_ok=True)
                return folder, _written(folder / inside, blob)[1]

            yield f", its {inside}", file.read_bytes(), place


def _written(path: Path, blob: bytes) -> tuple[Path, Path]:
    path.write_bytes(blob)
    return path, path.parent


def _demand_unread(
    what: str, each: Linked, place: Place, process: Process, own: MediaLimits
) -> None:
    with TemporaryDirectory() as folder:
        root, other = (Path(folder, name).resolve() for name in ("root", "root-other"))
        root.mkdir()
        other.mkdir()
        path, limits = other / f"other{each.suffix}", replace(own, allowed_root=root)

        def run(to: str) -> Any:
            return process(place(each.make(to), root)[0], limits)

        base = place(b"", root)[1]
        names = [os.fspath(path), path.as_uri(), os.path.relpath(path, base)]
        for to in names[: each.num_names]:
            found = []
            for content in each.contents:
                path.write_bytes(content)
                found.append(run(to))
            demand(
                all(it is None for it in found) or _is_same(*found),
                f"{what}: the file {to!r}, which it names, was read, outside allowed_root {root}; "
                f"{ADVICE}",
            )
        if not each.is_path:
            with Web().running() as web:
                run(web.url("ok"))
            demand(not web.asked, f"{what}: the server that it names was asked; {ADVICE}")


def _is_same(one: Any, two: Any) -> bool:
    if isinstance(one, MediaInput) and isinstance(two, MediaInput):
        return difference(one, two, with_key=False) is None
    return bool(one == two)


@since(1, 2)
def linked_files_are_not_read(subject: ProcessorSubject) -> None:
    """No file that an item names, by a link or an entity in it, is read outside `allowed_root`."""

    def process(source: Any, limits: MediaLimits) -> Any:
        try:
            return subject.within(source, limits)
        except FAULTS:
            return None

    demand_unread(subject.spec.kind, subject.sources(), process, subject.limits)


@since(1, 2)
def files_named_by_a_document_are_not_read(subject: SplitterSubject) -> None:
    """No file that a document names, by a link or an entity in it, and none that a folder has a
    link to, is read outside `allowed_root`."""

    def process(source: Any, limits: MediaLimits) -> Any:
        try:
            return [content_of(part, limits) for part in subject.parts(source, limits)]
        except FAULTS:
            return None

    folders = {name: path for name, path in subject.files().items() if path.is_dir()}
    for name, path in folders.items():
        _demand_no_links(f"sample {name!r}", path, process, subject.limits)
    try:
        demand_unread(subject.spec.kind, subject.sources(), process, subject.limits)
    except CheckSkipped:
        if not folders:
            raise


def _demand_no_links(what: str, path: Path, process: Process, own: MediaLimits) -> None:
    """Demands that files which are links out of a folder have no effect on its parts."""
    with TemporaryDirectory() as folder:
        root, other = (Path(folder, name).resolve() for name in ("root", "root-other"))
        found, limits = [], replace(own, allowed_root=root)
        files = [it for it in sorted(path.rglob("*")) if it.is_file()]
        for is_other in (False, True):
            for number, file in enumerate(files):
                link, content = root / file.relative_to(path), file.read_bytes()
                link.parent.mkdir(parents=True, exist_ok=True)
                (other / link.relative_to(root)).parent.mkdir(parents=True, exist_ok=True)
                # Each has the content of the next one, which is what it may be.
                after = files[(number + 1) % len(files)].read_bytes()
                (other / link.relative_to(root)).write_bytes(after if is_other else content)
                if not link.is_symlink():
                    link.symlink_to(other / link.relative_to(root))
            found.append(process(root, limits))
        demand(
            len(files) < 2 or found[0] == found[1],
            f"{what}: files of the folder that are links out of allowed_root were read; resolve "
            "links, and give paths as the sources of parts, which are compared with the root",
        )


def content_of(part: SplitPart, limits: MediaLimits) -> Any:
    """Returns what a part shows, as something that can be compared."""
    source = part.source
    if isinstance(source, (Drawing, DecodedImage)):
        return drawn(part, limits, SHOWN_SIDE).tobytes()
    if isinstance(source, (Image.Image, np.ndarray)):
        return source.tobytes()
    return source if isinstance(source, (bytes, str, Path)) else part.label


OF_PROCESSORS: tuple[Check, ...] = (linked_files_are_not_read,)
OF_SPLITTERS: tuple[Check, ...] = (files_named_by_a_document_are_not_read,)
