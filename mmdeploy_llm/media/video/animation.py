"""Reads animated GIF, WebP, PNG and AVIF as videos, through Pillow."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

from PIL import Image, ImageFile

from mmdeploy_llm.errors import MediaError, MediaLimitError, UnsupportedMediaError
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.media.image.coded_colours import shown
from mmdeploy_llm.media.image.files import OPENERS, file_digest

from .timeline import Timeline, check_duration, check_size, lost_frames

DEFAULT_LENGTH = 0.1  # seconds of a frame whose length is below SHORTEST_LENGTH, as in browsers
SHORTEST_LENGTH = 0.011  # seconds
MAX_ANIMATION_FRAMES = 20_000
FORMATS = tuple(name for name in ("GIF", "WEBP", "PNG", "AVIF") if name in OPENERS)


class Animation:
    """An animated image. Raises MediaError and its subclasses when it cannot be used."""

    has_chosen_frames = False

    def __init__(self, blob: bytes, name: str, limits: MediaLimits) -> None:
        self._blob, self._name = blob, name
        self.notes: Sequence[str] = ()
        try:
            opened = OPENERS[name](io.BytesIO(blob))
            check_size(*opened.size, limits)
            # The default image of a PNG is hidden where it is no frame of the animation.
            self._num_hidden = int(name == "PNG" and bool(opened.info.get("default_image")))
            lengths = _lengths(opened, name)[self._num_hidden :]
        except MediaError:
            raise
        except Exception as error:  # codecs raise anything for broken data
            raise self._broken(error) from None
        times, end = [], 0.0
        for length in lengths:
            times.append(end)
            end += length
        check_duration(end, limits)
        self.timeline = Timeline(
            width=opened.width,
            height=opened.height,
            times=times,
            duration=end,
            is_constant=max(lengths) - min(lengths) < 1e-6,
        )
        self.digest, self._is_managed = file_digest(blob, limits), limits.is_as_shown

    def read(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """See OpenVideo. Frames build on each other, so the last good frame replaces those after
        it that cannot be decoded."""
        opened = OPENERS[self._name](io.BytesIO(self._blob))
        latest: Image.Image | None = None
        told, num_lost = list[str](), 0
        for index in indices:
            try:
                opened.seek(index + self._num_hidden)
                latest = shown(
                    opened.copy(),
                    told,
                    is_managed=self._is_managed,
                    blob=self._blob,
                    name=self._name,
                )
            except Exception as error:  # codecs raise anything for broken data
                if latest is None:
                    raise self._broken(error) from None
                num_lost += 1
            self.notes = (*dict.fromkeys(told), *lost_frames(num_lost))
            yield latest

    def _broken(self, error: Exception) -> MediaError:
        return MediaError(
            f"the {self._name} animation is corrupt ({type(error).__name__} while reading it)"
        )


def _lengths(opened: ImageFile.ImageFile, name: str) -> list[float]:
    """Reads the length of each frame, in seconds."""
    count = int(getattr(opened, "n_frames", 1))
    if count < 2 and name in ("PNG", "AVIF"):
        raise UnsupportedMediaError(
            f"a {name} image without animation was given as a video; give it as an image"
        )
    if count > MAX_ANIMATION_FRAMES:
        raise MediaLimitError(
            f"the animation has {count} frames, {MAX_ANIMATION_FRAMES} are allowed; shorten it"
        )
    lengths = []
    for index in range(count):
        opened.seek(index)
        if name in ("WEBP", "AVIF"):  # Pillow reads a frame's length only with its pixels
            opened.load()
        seconds = float(opened.info.get("duration") or 0) / 1000
        lengths.append(seconds if seconds >= SHORTEST_LENGTH else DEFAULT_LENGTH)
    return lengths
