"""Says what files are, by their first bytes: of which kind of media, or why of none.

A file is opened once, for one read of HEAD bytes; several threads do it, since a disk of the
network answers each of them late.
"""

from __future__ import annotations

import importlib.util
import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from mmdeploy_llm.data.rows.names import BUILT_IN_KINDS
from mmdeploy_llm.hooks import KindTable
from mmdeploy_llm.media.tracks import PICTURE, Read, reader, tracks_of
from mmdeploy_llm.messages import MEDIA_KINDS
from mmdeploy_llm.system.portable import files
from mmdeploy_llm.values.first_bytes import EMPTY, HEAD, RAW, Format, format_of, is_text
from mmdeploy_llm.values.text.display import listed

from .animations import is_animated, is_collection, is_paged

NUM_THREADS = 8
FILES_AT_ONCE = 256
HEIF_HINT = 'pip install "mmdeploy-llm[heif]" reads it'
# Files of cameras whose first bytes are those of a TIFF, which would give their small preview.
_RAWS = (
    "3fr arw cr2 cr3 dcr dng erf iiq k25 kdc mef mos mrw nef nrw orf pef raf raw rw2 rwl sr2 srf "
    "srw x3f"
)
# Kinds whose formats the table of first bytes tells better than a few of them.
KNOWN_KINDS = frozenset((*MEDIA_KINDS, "audio", "pdf"))
FILMS = ("video", "audio")  # kinds whose files begin alike: their tracks say which they are
PAGED = "tiff"  # the kind of TIFF files whose pages are read one by one
RAW_SUFFIXES = frozenset(f".{name}" for name in _RAWS.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """A file of a kind. is_animated: an image of several frames; is_paged: one of several pages;
    is_collection: one of several pictures."""

    kind: str
    is_animated: bool = False
    is_paged: bool = False
    is_collection: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NotMedia:
    """Why a file is not read. label: what a summary counts, such as ".svg". hint: what helps."""

    label: str
    reason: str
    hint: str = ""


NOT_REGULAR = NotMedia(label="special file", reason="it is a FIFO, a socket or a device")


def read_kinds(
    paths: Sequence[str], has_heif: bool | None = None, kinds: KindTable = BUILT_IN_KINDS
) -> Iterator[Media | NotMedia]:
    """Yields what each file is, in order. has_heif: whether HEIF can be read; None looks. kinds:
    those that are media."""
    if has_heif is None:
        has_heif = importlib.util.find_spec("pillow_heif") is not None
    can_read = bool(has_heif)

    def some(begin: int) -> list[Media | NotMedia]:
        return [kind_of(path, can_read, kinds) for path in paths[begin : begin + FILES_AT_ONCE]]

    begins = range(0, len(paths), FILES_AT_ONCE)
    if len(begins) <= 1:
        yield from chain.from_iterable(map(some, begins))
        return
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kinds") as pool:
        yield from chain.from_iterable(pool.map(some, begins))


def kind_of(path: str, has_heif: bool, kinds: KindTable = BUILT_IN_KINDS) -> Media | NotMedia:
    """Says what a file is. One that has the name of a kind, and whose bytes are of no known format,
    or cannot be read, counts as what its name says: its own error tells more."""
    named = kinds.of_name(path)
    try:
        # Before it is opened, since a device may react to that, and after.
        if not stat.S_ISREG(os.stat(path).st_mode):
            return NOT_REGULAR
        fd = os.open(path, os.O_RDONLY | files.NO_WAIT)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return NOT_REGULAR
            head = files.read_at(fd, HEAD, 0)
            found = _by_tracks(
                format_of(head), lambda place, size: files.read_at(fd, size, place), status.st_size
            )
            if kind := _plugins_own(head, found, named, kinds):
                return Media(kind=kind)
            judged = _judged(path, found, has_heif, named, kinds)
            if found is None or not isinstance(judged, Media) or judged.kind != found.kind:
                return judged
            return Media(
                kind=judged.kind,
                is_animated=is_animated(fd, found),
                is_paged=is_paged(fd, found),
                is_collection=is_collection(fd, found),
            )
        finally:
            os.close(fd)
    except OSError as error:
        if named:
            return Media(kind=named)
        words = error.strerror or type(error).__name__
        return NotMedia(label="unreadable", reason=f"it cannot be read: {words}")


def kind_of_bytes(data: bytes, kinds: KindTable) -> str | None:
    """Returns the kind of a media file by its bytes alone."""
    head = data[:HEAD]
    found = _by_tracks(format_of(head), reader(data), len(data))
    known = found.kind if found is not None and found.kind in kinds.kinds else None
    return _plugins_own(head, found, None, kinds) or known


def _by_tracks(found: Format | None, read: Read, size: int) -> Format | None:
    """Returns a format of films and sounds as the kind that its tracks make it: a sound is what has
    no picture."""
    if found is None or found.kind not in FILMS:
        return found
    tracks = tracks_of(found.container, read, size)
    kind = "video" if PICTURE in tracks else "audio" if tracks else found.kind
    return found if kind == found.kind else replace(found, kind=kind)


def _plugins_own(
    head: bytes, found: Format | None, named: str | None, kinds: KindTable
) -> str | None:
    """Returns the kind that a plugin tells by first bytes of its own, None without such a kind. A
    format that is known keeps its kind, unless the file's name says the plugin's too."""
    claimed = kinds.of_bytes(head)
    is_known = found is not None and found.kind in kinds.kinds
    is_ours = claimed in KNOWN_KINDS and (is_known or is_text(head))
    if claimed is None or claimed in MEDIA_KINDS or is_ours:
        return None
    return claimed if not is_known or claimed == named else None


def _judged(
    path: str,
    found: Format | None,
    has_heif: bool,
    named: str | None,
    kinds: KindTable,
) -> Media | NotMedia:
    suffix = Path(path).suffix.lower()
    if suffix in RAW_SUFFIXES and not named and (found is None or found.image == "TIFF"):
        found = RAW
    if found is not None and found.image == "HEIF" and not has_heif:
        return NotMedia(label=suffix or "HEIF", reason="a HEIF image is not read", hint=HEIF_HINT)
    if named and named != kinds.of_name(f"x{suffix}"):  # ".ome.tiff" says more than first bytes do
        return Media(kind=named)
    if found is not None and found.kind in kinds.kinds:
        return Media(kind=found.kind)
    if named and (found in (None, EMPTY) or named not in kinds.first_bytes.values()):
        return Media(kind=named)
    if found is None:
        return NotMedia(
            label=suffix or "without a suffix", reason=f"it is no {listed(kinds.kinds)}"
        )
    noun = found.noun
    label = f"{noun} named {suffix}" if named else suffix or f"{noun} without a suffix"
    reason = f"it is {found.name}; {found.advice}" if found.advice else f"it is {found.name}"
    return NotMedia(label=label, reason=reason, hint=found.hint)
