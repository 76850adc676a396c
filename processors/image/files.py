"""Image files: from encoded bytes to an upright RGB image, within the limits. Imports no torch, so
that a worker process is small.

Only the formats of FORMATS are ever opened, by their own Pillow class: formats that run
interpreters or hide bombs (EPS, PDF, PSD, FITS ...) are out of reach, and so are Pillow's warnings
about large images. Of an animation the first frame counts.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType

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

from .modes import to_rgb
from .orientation import SIDEWAYS, stored_orientation, upright
from .png import SIGNATURE, metadata_first


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


def sniff(head: bytes) -> str | None:
    """The format that the first 16 bytes announce, None for one that is not accepted here."""
    signatures = {
        "PNG": head.startswith(SIGNATURE),
        "JPEG": head.startswith(b"\xff\xd8\xff"),
        "WEBP": head[:4] == b"RIFF" and head[8:12] == b"WEBP",
        "GIF": head.startswith((b"GIF87a", b"GIF89a")),
        "BMP": head.startswith(b"BM"),
        "TIFF": head.startswith((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")),
        "AVIF": head[4:12] in (b"ftypavif", b"ftypavis"),
    }
    return next((name for name, fits in signatures.items() if fits), None)


def peek_file(blob: bytes, limits: MediaLimits) -> ImageHeader:
    """The size of the image, from its header."""
    check_bytes(blob, "image", limits)
    opened = open_file(metadata_first(blob), limits)
    return ImageHeader(size=turned(opened.size, file_orientation(opened)))


def decode_file(blob: bytes, limits: MediaLimits, wanted: Wanted | None) -> DecodedImage:
    """The image; a JPEG at draft quality, no smaller than `wanted` says, unless that is None."""
    opened, draft_of = open_file(blob, limits), None
    if wanted is not None and isinstance(opened, QuietJpeg):
        orientation = file_orientation(opened)
        draft_of = width, height = turned(opened.size, orientation)
        least = wanted(height, width)[::-1]
        shrink_on_load(opened, turned(least, orientation))
    with reading(opened):
        opened.load()
        image = upright(to_rgb(opened), file_orientation(opened))
    return DecodedImage(image=image, digest=digest_of(b"encoded", blob), draft_of=draft_of)


def open_file(blob: bytes, limits: MediaLimits) -> ImageFile.ImageFile:
    """The image with its header read and its size within the limits; no pixel is decoded."""
    check_bytes(blob, "image", limits)
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
    check_pixels(image.size, limits)
    return image


def check_bytes(blob: bytes, kind: str, limits: MediaLimits) -> None:
    """Refuses nothing at all, and too much."""
    if not blob:
        raise MediaError(f"the {kind} is empty (0 bytes)")
    limits.check_bytes(len(blob), f"the {kind}")


def file_orientation(opened: ImageFile.ImageFile) -> int:
    """What is left to turn; Pillow turns TIFF images itself and gives their upright size."""
    is_turned = isinstance(opened, TiffImagePlugin.TiffImageFile)
    return 1 if is_turned else stored_orientation(opened.info)


def turned(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    """(width, height) as it is after turning, or was before."""
    return size[::-1] if orientation in SIDEWAYS else size


def check_pixels(size: tuple[int, int], limits: MediaLimits) -> None:
    """Refuses an image without pixels, or with too many."""
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
def reading(image: Image.Image) -> Iterator[None]:
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


def digest_of(form: bytes, data: bytes | bytearray | memoryview) -> str:
    """Identity of `data` within one form."""
    digest = blake2b(form, digest_size=20)
    digest.update(b"\0")
    digest.update(data)
    return digest.hexdigest()


def shrink_on_load(opened: ImageFile.ImageFile, size: tuple[int, int]) -> None:
    """Makes a JPEG that is not loaded yet load at the smallest of 1/1, 1/2, 1/4 and 1/8 that is not
    below `size`, (width, height) before turning, in either direction."""
    opened.draft(None, size)
