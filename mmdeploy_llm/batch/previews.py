"""Makes small pictures of a record's media: one of an image, the sampled frames of a video."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.messages import MediaItem, MediaRef

from .inputs import is_video_name
from .items import Media
from .records import Record

# Returns the JPEGs of one media item, none without a preview.
MakePreviews = Callable[[Media], Sequence[bytes]]
# Returns the JPEGs of the frames of the video at a path.
MakeStrip = Callable[[str], Sequence[bytes]]
MAX_FILE_BYTES = 256 * 2**20  # a larger image file gets no preview


class HasPreviews(Protocol):
    """The method of intake's MediaLoader that previews need."""

    def previews(self, item: MediaItem) -> Sequence[bytes]:
        """Returns JPEGs of a media item, see MediaLoader.previews."""


class VideoStrip:
    """Makes previews of the frames of a video file that the model received. Thread-safe.

    open_media: called once, for the first video.
    """

    def __init__(self, open_media: Callable[[], HasPreviews]) -> None:
        self._open = open_media
        self._lock = threading.Lock()
        self._media: HasPreviews | None = None

    def __call__(self, path: str) -> Sequence[bytes]:
        """Returns JPEGs, none for a video that cannot be read or no longer exists."""
        with self._lock:
            if self._media is None:
                self._media = self._open()
        source = MediaRef(kind="video", uri=path)
        try:
            return self._media.previews(MediaItem(kind="video", source=source, options={}))
        except RequestError:
            return ()


def media_of(record: Record) -> tuple[Media, ...]:
    """Returns the media of a record; for a record about a file, that file."""
    if record.path is None:
        return record.media
    kind = "video" if is_video_name(record.path) else "image"
    return (Media(kind=kind, name=os.path.abspath(record.path)),)


def file_previews(strip: MakeStrip | None = None) -> MakePreviews:
    """Returns a function that previews media files of this machine. It returns nothing for files
    that cannot be read or no longer exist, and for videos without `strip`."""
    from mmdeploy_llm_processors.image.thumbnail import thumbnail

    def make(media: Media) -> Sequence[bytes]:
        if media.kind == "video":
            return strip(media.name) if strip is not None and media.is_file else ()
        small = thumbnail(blob) if (blob := _read(media)) is not None else None
        return () if small is None else (small,)

    return make


def _read(media: Media) -> bytes | None:
    try:
        if not media.is_file or os.path.getsize(media.name) > MAX_FILE_BYTES:
            return None
        return Path(media.name).read_bytes()
    except OSError:
        return None
