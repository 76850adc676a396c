"""Deprecated: safe decoding of images moved to mmdeploy_llm.media."""

from typing import Any

from mmdeploy_llm.media.moved import moved

_HOMES = dict.fromkeys(
    ["FORMATS", "DecodedImage", "ImageDecoder", "ImageHeader"], "media.image.decode"
)
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    return moved(__name__, _HOMES, name)
