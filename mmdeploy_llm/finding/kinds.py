"""Says what files are, by their first bytes: an image, a video, or why they are neither.

A file is opened once, for one read of HEAD bytes; several threads do it, since a disk of the
network answers each of them late.
"""

from __future__ import annotations

import importlib.util
import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from mmdeploy_llm.datasets.names import IMAGE_SUFFIXES, VIDEO_SUFFIXES

from .animations import is_animated
from .signatures import EMPTY, HEAD, HEIF, RAW, TIFF, Format, format_of

NUM_THREADS = 8
FILES_AT_ONCE = 256
OPEN_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # never waits for a FIFO
HEIF_HINT = 'pip install "mmdeploy-llm[heif]" reads it'
# Files of cameras whose first bytes are those of a TIFF, which would give their small preview.
_RAWS = (
    "3fr arw cr2 cr3 dcr dng erf iiq k25 kdc mef mos mrw nef nrw orf pef raf raw rw2 rwl sr2 srf "
    "srw x3f"
)
RAW_SUFFIXES = frozenset(f".{name}" for name in _RAWS.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """An image or a video. kind: "image" or "video". is_animated: an image of several frames."""

    kind: str
    is_animated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NotMedia:
    """Why a file is not read. label: what a summary counts, such as ".svg". hint: what helps."""

    label: str
    reason: str
    hint: str = ""


NOT_REGULAR = NotMedia(label="special file", reason="it is a FIFO, a socket or a device")


def read_kinds(paths: Sequence[str], has_heif: bool | None = None) -> Iterator[Media | NotMedia]:
    """Yields what each file is, in order. has_heif: whether HEIF can be read; None looks."""
    if has_heif is None:
        has_heif = importlib.util.find_spec("pillow_heif") is not None
    can_read = bool(has_heif)

    def some(begin: int) -> list[Media | NotMedia]:
        return [kind_of(path, can_read) for path in paths[begin : begin + FILES_AT_ONCE]]

    begins = range(0, len(paths), FILES_AT_ONCE)
    if len(begins) <= 1:
        yield from chain.from_iterable(map(some, begins))
        return
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kinds") as pool:
        yield from chain.from_iterable(pool.map(some, begins))


def kind_of(path: str, has_heif: bool) -> Media | NotMedia:
    """Says what a file is. One that has the name of an image or a video, and whose bytes are of no
    known format, or cannot be read, counts as what its name says: its own error tells more."""
    try:
        # Before it is opened, since a device may react to that, and after.
        if not stat.S_ISREG(os.stat(path).st_mode):
            return NOT_REGULAR
        fd = os.open(path, OPEN_FLAGS)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return NOT_REGULAR
            found = format_of(os.pread(fd, HEAD, 0))
            return _judged(path, found, has_heif, found is not None and is_animated(fd, found))
        finally:
            os.close(fd)
    except OSError as error:
        return _unread(path, error.strerror or type(error).__name__)


def _judged(path: str, found: Format | None, has_heif: bool, animated: bool) -> Media | NotMedia:
    suffix = Path(path).suffix.lower()
    if suffix in RAW_SUFFIXES and (found is None or found is TIFF):
        found = RAW
    named = _named(suffix)
    if found is None or (found is EMPTY and named):
        return (
            Media(kind=named)
            if named
            else NotMedia(
                label=suffix or "without a suffix", reason="it is neither an image nor a video"
            )
        )
    if found is HEIF and not has_heif:
        return NotMedia(label=suffix or "HEIF", reason="a HEIF image is not read", hint=HEIF_HINT)
    if found.kind != "other":
        return Media(kind=found.kind, is_animated=animated)
    noun = found.noun
    label = f"{noun} named {suffix}" if named else suffix or f"{noun} without a suffix"
    reason = f"it is {found.name}; {found.advice}" if found.advice else f"it is {found.name}"
    return NotMedia(label=label, reason=reason, hint=found.hint)


def _unread(path: str, words: str) -> Media | NotMedia:
    named = _named(Path(path).suffix.lower())
    if named:
        return Media(kind=named)
    return NotMedia(label="unreadable", reason=f"it cannot be read: {words}")


def _named(suffix: str) -> str:
    return "image" if suffix in IMAGE_SUFFIXES else "video" if suffix in VIDEO_SUFFIXES else ""
