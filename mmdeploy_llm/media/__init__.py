"""Decodes what comes from outside, safely: images, videos, sounds and files below a folder.
Processors of other packages build on it, as the built-in ones do.

Public names are imported when first used: importing this package imports neither Pillow, PyAV nor
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmdeploy_llm.media.image.decode import Drawing
    from mmdeploy_llm.media.isolation import Workers
    from mmdeploy_llm.media.pixels import (
        CLIP_MEAN,
        CLIP_STD,
        Patchifier,
        PatchOptions,
        normalise,
        patchify,
        resize,
        resize_draft,
        tile_grid,
        tiles,
        to_array,
    )

    from .beneath import open_beneath
    from .documents.page_parts import PageParts
    from .image.decode import DecodedImage, ImageDecoder, ImageHeader, decode_image
    from .image.thumbnail import small_jpeg
    from .local import read_beneath
    from .sound.decode import OpenSound, SoundDecoder
    from .video.opening import open_video
    from .video.timeline import OpenVideo, Timeline, constant_timeline

__all__ = [
    "CLIP_MEAN",
    "CLIP_STD",
    "DecodedImage",
    "Drawing",
    "ImageDecoder",
    "ImageHeader",
    "OpenSound",
    "OpenVideo",
    "PageParts",
    "PatchOptions",
    "Patchifier",
    "SoundDecoder",
    "Timeline",
    "Workers",
    "constant_timeline",
    "decode_image",
    "normalise",
    "open_beneath",
    "open_video",
    "patchify",
    "read_beneath",
    "resize",
    "resize_draft",
    "small_jpeg",
    "tile_grid",
    "tiles",
    "to_array",
]

_HOMES = {
    "CLIP_MEAN": "mmdeploy_llm.media.pixels",
    "CLIP_STD": "mmdeploy_llm.media.pixels",
    "DecodedImage": ".image.decode",
    "Drawing": ".image.decode",
    "ImageDecoder": ".image.decode",
    "ImageHeader": ".image.decode",
    "OpenSound": ".sound.decode",
    "OpenVideo": ".video.timeline",
    "PageParts": ".documents.page_parts",
    "PatchOptions": "mmdeploy_llm.media.pixels",
    "Patchifier": "mmdeploy_llm.media.pixels",
    "SoundDecoder": ".sound.decode",
    "Timeline": ".video.timeline",
    "Workers": "mmdeploy_llm.media.isolation",
    "constant_timeline": ".video.timeline",
    "decode_image": ".image.decode",
    "normalise": "mmdeploy_llm.media.pixels",
    "open_beneath": ".beneath",
    "open_video": ".video.opening",
    "patchify": "mmdeploy_llm.media.pixels",
    "read_beneath": ".local",
    "resize": "mmdeploy_llm.media.pixels",
    "resize_draft": "mmdeploy_llm.media.pixels",
    "small_jpeg": ".image.thumbnail",
    "tile_grid": "mmdeploy_llm.media.pixels",
    "tiles": "mmdeploy_llm.media.pixels",
    "to_array": "mmdeploy_llm.media.pixels",
}


def __getattr__(name: str) -> Any:
    """Imports a public name from the module that defines it (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
