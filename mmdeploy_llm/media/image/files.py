"""Decodes image files to upright RGB images, within the limits. Imports no torch, so that a worker
process is small.

Only the formats of FORMATS are opened, by their own Pillow class: formats that run interpreters or
hide decompression bombs (EPS, PDF, PSD, FITS ...) are never tried, and Pillow's warnings about
large images do not occur. An animation is read at its first frame.
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
    TiffImagePlugin,
    WebPImagePlugin,
    features,
)

from mmdeploy_llm.errors import MediaError, MediaLimitError, RequestError, UnsupportedMediaError
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.values.first_bytes import HEAD, format_of

from .coded_colours import shown
from .heif import OWN_ORIENTATION, is_installed, open_heif
from .orientation import SIDEWAYS, stored_orientation, upright
from .png import ExactPng, metadata_first
from .tiff_pixels import ExactTiff


class QuietJpeg(JpegImagePlugin.JpegImageFile):
    """A JPEG file whose EXIF data stay unread: Pillow parses them for a resolution and warns.

    The whole file is decoded in one call without Python's lock, where Pillow makes one call for
    each 64 KiB.
    """

    decodermaxblock = 2**31 - 1

    def getexif(self) -> Image.Exif:
        """Returns empty EXIF data."""
        return Image.Exif()


Opener = Callable[[io.BytesIO], ImageFile.ImageFile]
# (height, width) of an upright image -> the smallest (height, width) that is large enough.
LeastSize = Callable[[int, int], tuple[int, int]]


def _openers() -> Mapping[str, Opener]:
    """Returns format -> Pillow class; AVIF only if this Pillow was built with it, HEIF only if
    pillow-heif is installed."""
    openers: dict[str, Opener] = {
        "PNG": ExactPng,
        "JPEG": QuietJpeg,
        "WEBP": WebPImagePlugin.WebPImageFile,
        "GIF": GifImagePlugin.GifImageFile,
        "BMP": BmpImagePlugin.BmpImageFile,
        "TIFF": ExactTiff,
    }
    if features.check("avif"):
        openers["AVIF"] = importlib.import_module("PIL.AvifImagePlugin").AvifImageFile
    if is_installed():
        openers["HEIF"] = open_heif
    return MappingProxyType(openers)


OPENERS = _openers()
FORMATS = tuple(OPENERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageHeader:
    """The header of an image whose pixels are not decoded. size: (width, height), upright."""

    size: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodedImage:
    """An upright image in mode RGB.

    digest: hash of the encoded bytes if there are any, else of the RGB pixels and their shape, so
        that equal content has an equal digest within one of these two forms.
    notes: sentences about what was a guess, such as how numbers without a white were scaled.
    draft_of: full (width, height) of an image decoded at draft quality, whose `image` may be
        smaller; None for one decoded exactly.
    """

    image: Image.Image
    digest: str
    draft_of: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> tuple[int, int]:
        """Full (width, height) of the image."""
        return self.draft_of or self.image.size


def sniff(head: bytes) -> str | None:
    """Returns the format that the first HEAD bytes announce, None for an unknown one."""
    found = format_of(head[:HEAD])
    return (found.image if found else "") or None


def peek_file(blob: bytes, limits: MediaLimits) -> ImageHeader:
    """Reads the size of the image from its header."""
    check_bytes(blob, "image", limits)
    opened = open_file(metadata_first(blob), limits)
    return ImageHeader(size=oriented(opened.size, file_orientation(opened)))


def decode_file(blob: bytes, limits: MediaLimits, wanted: LeastSize | None) -> DecodedImage:
    """Decodes the image; a JPEG at draft quality, no smaller than `wanted` says, unless None."""
    opened, draft_of, notes = open_file(blob, limits), None, list[str]()
    if wanted is not None and isinstance(opened, QuietJpeg):
        orientation = file_orientation(opened)
        draft_of = width, height = oriented(opened.size, orientation)
        least = wanted(height, width)[::-1]
        shrink_on_load(opened, oriented(least, orientation))
    with reading(opened):
        if opened.info.get("default_image"):  # of a PNG, for programs that know no animations
            opened.seek(1)
        opened.load()
        check_pixels(opened.size, limits)  # some containers say another size than their images
        managed = limits.is_as_shown
        colours = shown(opened, notes, is_managed=managed, blob=blob, name=opened.format)
        image = upright(colours, file_orientation(opened))
    return DecodedImage(
        image=image, digest=file_digest(blob, limits), draft_of=draft_of, notes=tuple(notes)
    )


def file_digest(blob: bytes | bytearray | memoryview, limits: MediaLimits) -> str:
    """Hashes the file of an image or a video, and what of the limits changes its pixels."""
    return digest_of(b"encoded" if limits.is_as_shown else b"encoded as-stored", blob)


def open_file(blob: bytes, limits: MediaLimits) -> ImageFile.ImageFile:
    """Opens an image and checks its size against the limits; decodes no pixels."""
    check_bytes(blob, "image", limits)
    name = sniff(blob)
    if name is None or name not in OPENERS:
        raise UnsupportedMediaError(
            f"{_unread(name, blob)}; convert it to one of {', '.join(FORMATS)}"
        )
    try:
        image = OPENERS[name](io.BytesIO(blob))
    except RequestError:
        raise
    except Exception as error:  # codecs raise anything for broken data
        raise _unreadable(name, error) from None
    check_pixels(image.size, limits)
    return image


def _unread(name: str | None, blob: bytes) -> str:
    """Says why a format cannot be read."""
    if name == "HEIF":
        return 'HEIF images are read by pillow-heif (pip install "mmdeploy-llm[heif]")'
    if name:
        return f"this Pillow cannot read {name}"
    found = format_of(blob[:HEAD])
    if found is None:
        return "its first bytes match no image format"
    return f"it is {found.name}" + (f" ({found.advice})" if found.advice else "")


def check_bytes(blob: bytes, kind: str, limits: MediaLimits) -> None:
    """Raises MediaError for an empty file and MediaLimitError for one over `max_bytes`."""
    if not blob:
        raise MediaError(f"the {kind} is empty (0 bytes)")
    limits.check_bytes(len(blob), f"the {kind}")


def file_orientation(opened: ImageFile.ImageFile) -> int:
    """Returns the orientation still to apply; Pillow rotates TIFF images itself, and a HEIF
    container may have rotated the image."""
    if isinstance(opened, TiffImagePlugin.TiffImageFile):
        return 1
    own = opened.info.get(OWN_ORIENTATION)
    return stored_orientation(opened.info) if own is None else int(own)


def oriented(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    """Converts (width, height) from stored to upright, or back."""
    return size[::-1] if orientation in SIDEWAYS else size


def check_pixels(size: tuple[int, int], limits: MediaLimits) -> None:
    """Raises MediaError for an image without pixels, MediaLimitError for one with too many."""
    width, height = size
    if width < 1 or height < 1:
        raise MediaError(f"the image has no pixels ({width} x {height})")
    if width * height > limits.max_pixels:
        raise MediaLimitError(
            f"the image has {width} x {height} = {width * height} pixels, {limits.max_pixels} are "
            "allowed; shrink it or raise max_image_pixels"
        )


@contextmanager
def reading(image: Image.Image) -> Iterator[None]:
    """Converts all errors in the block to MediaError: codecs raise anything for broken data."""
    try:
        yield
    except RequestError:
        raise
    except Exception as error:
        if _is_closed(image, error):
            raise MediaError(
                "the PIL image was closed before it was read; give it open, or give its path"
            ) from None
        raise _unreadable(image.format or "Pillow", error) from None


# What Pillow says of sound TIFF files whose bits, samples or byte order it has no reader for.
UNKNOWN_TO_PILLOW = frozenset({"unknown pixel mode", "unknown data organization"})


def _is_closed(image: Image.Image, error: Exception) -> bool:
    """Whether reading failed because the caller has closed the image or its file. Pillow only
    asserts that there is a file."""
    if isinstance(error, AssertionError):
        return getattr(image, "fp", image) is None
    return isinstance(error, ValueError) and "closed" in str(error)


def _unreadable(name: str, error: Exception) -> MediaError:
    """Builds the caller's error without Pillow's message, which can hold addresses and paths."""
    if isinstance(error, (Image.DecompressionBombError, Image.DecompressionBombWarning)):
        return MediaLimitError(f"the {name} image would be larger than Pillow allows; shrink it")
    if isinstance(error, MemoryError):
        return MediaLimitError(f"there is not enough memory to decode the {name} image; shrink it")
    if str(error) in UNKNOWN_TO_PILLOW:
        return UnsupportedMediaError(
            f"the {name} image has pixels in a form that Pillow does not read ({error}); convert "
            "it to PNG, or to 8 bits"
        )
    fault = "truncated" if "truncated" in str(error).lower() else "corrupt"
    return MediaError(f"the {name} image is {fault} ({type(error).__name__} while reading it)")


def digest_of(form: bytes, data: bytes | bytearray | memoryview) -> str:
    """Hashes `data`. form: keeps the digests of encoded bytes and of pixels apart."""
    digest = blake2b(form, digest_size=20)
    digest.update(b"\0")
    digest.update(data)
    return digest.hexdigest()


def shrink_on_load(opened: ImageFile.ImageFile, size: tuple[int, int]) -> None:
    """Makes a JPEG that is not loaded yet load at the smallest of 1/1, 1/2, 1/4 and 1/8 of its size
    that is not below `size` in either direction. size: (width, height) as stored."""
    opened.draft(None, size)
