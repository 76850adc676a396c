"""Decodes what comes from outside, safely: images, videos and files below a folder. Processors of
other packages build on it, as the built-in ones do.

Public names are imported when first used: importing this package imports neither Pillow, PyAV nor
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmdeploy_llm.isolation import Workers

    from .beneath import open_beneath
    from .image.decode import DecodedImage, ImageDecoder, ImageHeader
    from .image.thumbnail import small_jpeg
    from .local import read_local
    from .video.opening import open_video
    from .video.timeline import OpenVideo, Timeline, constant_timeline

__all__ = [
    "DecodedImage",
    "ImageDecoder",
    "ImageHeader",
    "OpenVideo",
    "Timeline",
    "Workers",
    "constant_timeline",
    "open_beneath",
    "open_video",
    "read_local",
    "small_jpeg",
]

_HOMES = {
    "DecodedImage": ".image.decode",
    "ImageDecoder": ".image.decode",
    "ImageHeader": ".image.decode",
    "OpenVideo": ".video.timeline",
    "Timeline": ".video.timeline",
    "Workers": "mmdeploy_llm.isolation",
    "constant_timeline": ".video.timeline",
    "open_beneath": ".beneath",
    "open_video": ".video.opening",
    "read_local": ".local",
    "small_jpeg": ".image.thumbnail",
}


def __getattr__(name: str) -> Any:
    """Imports a public name from the module that defines it (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
