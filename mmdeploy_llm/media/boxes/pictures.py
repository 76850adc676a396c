"""Sizes of a picture: its own, and that of what the model sees of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from .reading import Size


@runtime_checkable
class ShowsSize(Protocol):
    """A processor that says at which (width, height) the model sees a picture."""

    def shown_size(self, item: Any, options: Mapping[str, Any]) -> Size:
        """Returns it for what `count_tokens` accepts."""


def sizes_of(processor: object, known: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `size` and `shown` of a MediaInput. known: what a processor counts tokens of."""
    shown = processor.shown_size(known, options) if isinstance(processor, ShowsSize) else None
    return {"size": getattr(known, "size", None), "shown": shown}
