"""Small pictures of a record's media: one of an image, the chosen frames of a video."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from .inputs import is_video_name
from .items import Media
from .records import Record

# JPEGs of one media item, none where there is no preview.
MakePreviews = Callable[[Media], Sequence[bytes]]
# JPEGs of the frames of the video at a path.
MakeStrip = Callable[[str], Sequence[bytes]]
MAX_FILE_BYTES = 256 * 2**20  # a larger image file gets no preview


def media_of(record: Record) -> tuple[Media, ...]:
    """The media of a record; of one about a file, that file."""
    if record.path is None:
        return record.media
    kind = "video" if is_video_name(record.path) else "image"
    return (Media(kind=kind, name=os.path.abspath(record.path)),)


def file_previews(strip: MakeStrip | None = None) -> MakePreviews:
    """Previews of media that are files of this machine; of what cannot be read (any more), and of
    videos without `strip`, none."""
    # mypy cannot follow the renamed folder of an editable install.
    from mmdeploy_llm_processors.image.thumbnail import thumbnail  # type: ignore[import-not-found]

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
