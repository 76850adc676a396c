"""From encoded bytes or a loaded object to an upright RGB image, within the limits.

Only the formats of FORMATS are ever opened, by their own Pillow class: formats that run
interpreters or hide bombs (EPS, PDF, PSD, FITS ...) are out of reach, and so are Pillow's warnings
about large images. Of an animation the first frame counts; of an opened Pillow image, the frame it
stands at.
"""

from __future__ import annotations

import importlib
import io
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
    features,
)

from mmdeploy_llm.errors import MediaError, MediaLimitError, RequestError, UnsupportedMediaError
from mmdeploy_llm.hooks import MediaLimits

from .arrays import array_size, array_to_rgb
from .draft import shrink_on_load
from .modes import to_rgb
from .orientation import SIDEWAYS, live_orientation, stored_orientation, upright


class QuietJpeg(JpegImagePlugin.JpegImageFile):
    """Leaves EXIF data unread, which Pillow looks through for a resolution, with warnings.

    The file is decoded in one call, without Python's lock, where Pillow makes one for each 64 KiB.
    """

    decodermaxblock = 2**31 - 1

    def getexif(self) -> Image.Exif:
        """Nothing."""
        return Image.Exif()


Opener = Callable[[io.BytesIO], ImageFile.ImageFile]
# (height, width) of an upright image -> the least (height, width) that is enough.
Wanted = Callable[[int, int], tuple[int, int]]


def _openers() -> Mapping[str, Opener]:
    """Format -> what reads it; AVIF only where this Pillow was built with it."""
    openers: dict[str, Opener] = {
        "PNG": PngImagePlugin.PngImageFile,
        "JPEG": QuietJpeg,
        "WEBP": WebPImagePlugin.WebPImageFile,
        "GIF": GifImagePlugin.GifImageFile,
        "BMP": BmpImagePlugin.BmpImageFile,
        "TIFF": TiffImagePlugin.TiffImageFile,
    }
    if features.check("avif"):
        openers["AVIF"] = importlib.import_module("PIL.AvifImagePlugin").AvifImageFile
    return MappingProxyType(openers)


OPENERS = _openers()
FORMATS = tuple(OPENERS)
NUM_LOCKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageHeader:
    """What is known of an image before its pixels are decoded. size: (width, height), upright."""

    size: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodedImage:
    """An upright image in mode RGB.

    digest: of the encoded bytes where there are such, else of the RGB pixels and their shape, so
    that equal content has an equal digest within one of these two forms.
    draft_of: (width, height) in full of an image decoded at draft quality, which `image` may be
    below; None for one decoded exactly.
    """

    image: Image.Image
    digest: str
    draft_of: tuple[int, int] | None = None

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) of the image in full."""
        return self.draft_of or self.image.size


class ImageDecoder:
    """Opens and decodes images, from several threads at once."""

    def __init__(self) -> None:
        # An opened Pillow image loads its pixels on first use; two threads must not do so at once.
        self._locks = tuple(threading.Lock() for _ in range(NUM_LOCKS))

    def decode(
        self, source: Any, limits: MediaLimits, wanted: Wanted | None = None
    ) -> DecodedImage:
        """The image behind bytes, a PIL image, a numpy array or a torch tensor; none is changed.

        wanted: has the bytes of a JPEG decoded at draft quality, no smaller than it says; None:
        exactly. Raises MediaError for what cannot be read, MediaLimitError for what is over a
        limit, before it is decoded, and UnsupportedMediaError for another form or format.
        """
        if isinstance(source, (bytes, bytearray, memoryview)):
            return _decoded(bytes(source), limits, wanted)
        if isinstance(source, Image.Image):
            _check_pixels(source.size, limits)
            image = self._caller_image(source)
        else:
            _check_pixels(array_size(source), limits)
            image = array_to_rgb(source)
        shape = f"rgb {image.width} {image.height}".encode()
        return DecodedImage(image=image, digest=_digest(shape, image.tobytes()))

    def peek(self, source: Any, limits: MediaLimits) -> ImageHeader:
        """The size of the image, from its header. Raises as `decode`, as far as a header tells."""
        if isinstance(source, (bytes, bytearray, memoryview)):
            opened = _open(bytes(source), limits)
            return ImageHeader(size=_turned(opened.size, _orientation(opened)))
        if not isinstance(source, Image.Image):
            size = array_size(source)
            _check_pixels(size, limits)
            return ImageHeader(size=size)
        _check_pixels(source.size, limits)
        with self._lock(source), _reading(source):
            orientation = live_orientation(source)
        return ImageHeader(size=_turned(source.size, orientation))

    def _caller_image(self, image: Image.Image) -> Image.Image:
        """The caller's image upright and in RGB; loading is all that happens to it."""
        with _reading(image):
            with self._lock(image):
                image.load()
                orientation = live_orientation(image)
            return upright(to_rgb(image), orientation)

    def _lock(self, image: Image.Image) -> threading.Lock:
        return self._locks[id(image) // 16 % NUM_LOCKS]


def sniff(head: bytes) -> str | None:
    """The format that the first 16 bytes announce, None for one that is not accepted here."""
    signatures = {
        "PNG": head.startswith(b"\x89PNG\r\n\x1a\n"),
        "JPEG": head.startswith(b"\xff\xd8\xff"),
        "WEBP": head[:4] == b"RIFF" and head[8:12] == b"WEBP",
        "GIF": head.startswith((b"GIF87a", b"GIF89a")),
        "BMP": head.startswith(b"BM"),
        "TIFF": head.startswith((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")),
        "AVIF": head[4:12] in (b"ftypavif", b"ftypavis"),
    }
    return next((name for name, fits in signatures.items() if fits), None)


def _decoded(blob: bytes, limits: MediaLimits, wanted: Wanted | None) -> DecodedImage:
    opened, draft_of = _open(blob, limits), None
    if wanted is not None and isinstance(opened, QuietJpeg):
        orientation = _orientation(opened)
        draft_of = width, height = _turned(opened.size, orientation)
        least = wanted(height, width)[::-1]
        shrink_on_load(opened, _turned(least, orientation))
    with _reading(opened):
        opened.load()
        image = upright(to_rgb(opened), _orientation(opened))
    return DecodedImage(image=image, digest=_digest(b"encoded", blob), draft_of=draft_of)


def _open(blob: bytes, limits: MediaLimits) -> ImageFile.ImageFile:
    """The image with its header read and its size within the limits; no pixel is decoded."""
    if not blob:
        raise MediaError("the image is empty (0 bytes)")
    if len(blob) > limits.max_bytes:
        raise MediaLimitError(
            f"the image has {len(blob)} bytes, {limits.max_bytes} are allowed; shrink it or raise "
            "max_media_bytes"
        )
    name = sniff(blob[:16])
    if name is None or name not in OPENERS:
        found = f"{name} is" if name else "its first bytes are"
        raise UnsupportedMediaError(
            f"{found} of no image format that is read here; convert it to one of "
            f"{', '.join(FORMATS)}"
        )
    try:
        image = OPENERS[name](io.BytesIO(blob))
    except Exception as error:  # codecs raise anything for broken data
        raise _unreadable(name, error) from None
    _check_pixels(image.size, limits)
    return image


def _orientation(opened: ImageFile.ImageFile) -> int:
    """What is left to turn; Pillow turns TIFF images itself and gives their upright size."""
    is_turned = isinstance(opened, TiffImagePlugin.TiffImageFile)
    return 1 if is_turned else stored_orientation(opened.info)


def _turned(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    return size[::-1] if orientation in SIDEWAYS else size


def _check_pixels(size: tuple[int, int], limits: MediaLimits) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise MediaError(f"the image has no pixels ({width} x {height})")
    if width * height > limits.max_pixels:
        raise MediaLimitError(
            f"the image has {width} x {height} = {width * height} pixels, {limits.max_pixels} are "
            "allowed; "
            "shrink it or raise max_image_pixels"
        )


@contextmanager
def _reading(image: Image.Image) -> Iterator[None]:
    """Codecs raise anything for broken data; all of it is that image's MediaError."""
    try:
        yield
    except RequestError:
        raise
    except Exception as error:
        raise _unreadable(image.format or "Pillow", error) from None


def _unreadable(name: str, error: Exception) -> MediaError:
    """The error for the caller. Pillow's own words are left out: they can hold addresses and
    paths."""
    if isinstance(error, (Image.DecompressionBombError, Image.DecompressionBombWarning)):
        return MediaLimitError(f"the {name} image would be larger than Pillow allows; shrink it")
    if isinstance(error, MemoryError):
        return MediaLimitError(f"there is no memory to decode the {name} image; shrink it")
    fault = "truncated" if "truncated" in str(error).lower() else "corrupt"
    return MediaError(f"the {name} image is {fault} ({type(error).__name__} while reading it)")


def _digest(form: bytes, data: bytes) -> str:
    digest = blake2b(form, digest_size=20)
    digest.update(b"\0")
    digest.update(data)
    return digest.hexdigest()
