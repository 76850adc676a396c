"""Keeps of a prompt what its output shows: texts, names and options as they are; of media that were
handed over in memory their size and a thumbnail, so that no pixels stay alive with the output."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np
from PIL import Image, ImageFile

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.media.image.decode import Drawing
from mmdeploy_llm.values.text.display import shown

from .image.arrays import array_size
from .image.decode import is_apart
from .image.files import oriented, peek_file
from .image.modes import to_rgb
from .image.orientation import live_orientation, stored_orientation, upright
from .image.thumbnail import small_jpeg

SMALL = 4096  # bytes; what is smaller stays as it is
THUMBNAIL_SIZE = 160  # pixels of the longer side
NUM_THUMBNAILS = 4  # of one prompt

_LIMITS = MediaLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptMedia:
    """Stands for a media item of which nothing else is known.

    form: what the caller handed over, such as "array uint8 [16, 480, 640, 3]".
    """

    form: str

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data."""
        return {"form": self.form}

    def __repr__(self) -> str:
        return f"<{self.form}>"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class KeptImage(Drawing):
    """Stands for a picture. Its tokens can be counted and its boxes found, as its size is known.

    size: (width, height), upright. form: what the caller handed over, such as "RGB image".
    thumbnail: a JPEG with no side above THUMBNAIL_SIZE pixels; None where none was made.
    """

    size: tuple[int, int]
    form: str
    thumbnail: bytes | None = None

    @property
    def digest(self) -> str:  # type: ignore[override]
        """See Drawing; pixels that are gone have none."""
        raise self._gone()

    def draw(self, size: tuple[int, int], limits: MediaLimits) -> np.ndarray:
        """Raises MediaError: the pixels are gone."""
        raise self._gone()

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, without the thumbnail."""
        return {"form": self.form, "size": list(self.size)}

    def __repr__(self) -> str:
        return f"<{self.form} of {self.size[0]} x {self.size[1]}>"

    def _gone(self) -> MediaError:
        return MediaError(
            f"this is what an output kept of a {self.form}: its pixels are gone; give the picture "
            "itself"
        )


def kept(value: Any) -> Any:
    """Returns a prompt as its output keeps it: `value` itself where it holds no media in memory,
    else a copy of its dicts and lists with a KeptMedia or a KeptImage in place of each."""
    is_small = isinstance(value, str) and len(value) <= SMALL
    return value if is_small else _kept_safely(value)


def _kept_safely(value: Any) -> Any:
    """Returns what is kept of any object: an item's own error must not come from here."""
    try:
        return _Keeper().kept(value)
    except Exception:  # properties of a caller's objects raise anything; loops end here too
        return KeptMedia(form=f"{type(value).__name__} that cannot be read")


class _Keeper:
    """Makes what is kept of one prompt, with few thumbnails: a video may be a list of pictures."""

    def __init__(self) -> None:
        self._num_thumbnails = 0

    def kept(self, value: Any) -> Any:
        """Returns `value` or a copy, see above."""
        if isinstance(value, Mapping):
            found = dict(zip(value, map(self.kept, value.values()), strict=True))
            return found if any(found[key] is not own for key, own in value.items()) else value
        if isinstance(value, (list, tuple)) and not (value and isinstance(value[0], int)):
            items = [self.kept(own) for own in value]  # of others than token ids
            copied = tuple(items) if isinstance(value, tuple) else items
            return value if all(map(is_, items, value)) else copied
        if isinstance(value, Image.Image):
            return self._kept_picture(value)
        return _kept_object(value)

    def _kept_picture(self, image: Image.Image) -> KeptImage:
        form, thumbnail = f"{image.mode} image", None
        # Nothing is decoded here: its limits are checked where the item is read.
        is_decoded = not isinstance(image, ImageFile.ImageFile) or image.fp is None
        if is_decoded and self._num_thumbnails < NUM_THUMBNAILS:
            self._num_thumbnails += 1
            with suppress(Exception):  # codecs raise anything; the item itself gets the message
                thumbnail = _thumbnail(image)
        orientation = live_orientation(image) if is_decoded else stored_orientation(image.info)
        size = oriented(image.size, orientation)
        return KeptImage(size=size, form=form, thumbnail=thumbnail)


def _kept_object(value: Any) -> Any:
    """Returns what is kept of a value that is neither a container nor a PIL image."""
    if isinstance(value, str):
        is_data = len(value) > SMALL and value[:5].lower() == "data:"
        return KeptMedia(form=_data_form(value)) if is_data else value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return value if len(value) <= SMALL else _kept_bytes(bytes(value))
    if callable(getattr(value, "read", None)):
        return KeptMedia(form=f"file {shown(getattr(value, 'name', '(no name)'))}")
    shape = [int(size) for size in getattr(value, "shape", ())]
    if len(shape) < 2 or int(getattr(value, "nbytes", 0)) <= SMALL:
        return value
    dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
    form = f"{type(value).__name__} of {dtype} {shape}"
    if len(shape) == 3:
        with suppress(MediaError):
            return KeptImage(size=array_size(value), form=form)
    return KeptMedia(form=form)


def _kept_bytes(blob: bytes) -> KeptImage | KeptMedia:
    form = f"{len(blob):,} bytes"
    if not is_apart(blob, _LIMITS):  # such a file is opened in another process only
        with suppress(MediaError):
            return KeptImage(size=peek_file(blob, _LIMITS).size, form=form)
    return KeptMedia(form=form)


def _data_form(url: str) -> str:
    head = url[:100].partition(",")[0]
    return f"data: URL of {len(url):,} characters, {head[5:]}"


def _thumbnail(image: Image.Image) -> bytes:
    """Returns a small JPEG. Most pixels are skipped, so that its cost does not grow with theirs,
    but of a TIFF, whose tags say whether zeros are white: a resized one has none."""
    orientation = live_orientation(image)
    if hasattr(image, "tag_v2"):
        image = to_rgb(image)
    scale = min(1.0, 4 * THUMBNAIL_SIZE / max(image.size))
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    small = image if scale == 1.0 else image.resize(size, Image.Resampling.NEAREST)
    return small_jpeg(upright(to_rgb(small), orientation), THUMBNAIL_SIZE)
