"""Generates small media of the kinds that have common file formats, for processors without samples
of their own: what they must read, twins that differ in a few bytes, and giants to be refused."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Any

from mmdeploy_llm.hooks import MediaLimits

from . import clips, documents, pictures, sounds
from .clips import video_bytes
from .pictures import image_bytes, noise, pixels, png_header

__all__ = [
    "BY_KIND",
    "CORRUPT",
    "giants",
    "image_bytes",
    "noise",
    "pixels",
    "png_header",
    "samples",
    "too_large",
    "twins",
    "unloaded",
    "video_bytes",
]

# Kind -> the module whose functions samples, twins, too_large and giants make media of it.
BY_KIND: Mapping[str, ModuleType] = MappingProxyType(
    {"audio": sounds, "image": pictures, "pdf": documents, "video": clips}
)
CORRUPT: Mapping[str, bytes] = MappingProxyType(
    {
        "no bytes at all": b"",
        "zero bytes": bytes(512),
        "noise": random.Random(0).randbytes(512),
    }
)


def samples(kind: str) -> dict[str, Any]:
    """Returns name -> source of that kind, all of different content; {} for an unknown kind."""
    return _made("samples", kind)


def twins(kind: str) -> dict[str, tuple[Any, Any]]:
    """Returns name -> two sources of that kind that differ in a few bytes; {} for an unknown
    kind."""
    return _made("twins", kind)


def unloaded(kind: str) -> list[Any]:
    """Returns sources of the same content that are read only when they are used; [] for an unknown
    kind."""
    make = getattr(BY_KIND.get(kind), "unloaded", list)
    return list(make())


def too_large(kind: str) -> dict[str, tuple[Any, MediaLimits]]:
    """Returns name -> (source of that kind, limits that it exceeds); {} for an unknown kind."""
    return _made("too_large", kind)


def giants(kind: str) -> dict[str, bytes]:
    """Returns name -> few bytes that claim an item that no machine could hold, in formats that a
    processor may or may not read; {} for an unknown kind."""
    return _made("giants", kind)


def _made(name: str, kind: str) -> dict[str, Any]:
    make = getattr(BY_KIND.get(kind), name, dict)
    found: dict[str, Any] = make()
    return found
