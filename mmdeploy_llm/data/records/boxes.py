"""The boxes of a record: fields `boxes` and `picture_size`, in JSON values and as objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmdeploy_llm.media.boxes.reading import Box, Size

MAX_PIXELS = 10**9  # of a side
CORNERS = ("x0", "y0", "x1", "y1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureBoxes:
    """The boxes of an item's picture. size: (width, height) of the picture, upright."""

    size: Size
    boxes: list[Box] = field(default_factory=list)


def values_of(boxes: Iterable[Box]) -> tuple[dict[str, Any], ...]:
    """Returns the boxes as a record has them."""
    return tuple({"label": own.label, "box": [own.x0, own.y0, own.x1, own.y1]} for own in boxes)


def boxes_of(
    boxes: Iterable[Mapping[str, Any]], picture_size: Sequence[int]
) -> PictureBoxes | None:
    """Returns the boxes of a record; None when it is of a run that read none."""
    if not picture_size:
        return None
    from mmdeploy_llm.media.boxes.reading import Box  # which imports hooks: --help does not

    width, height = picture_size
    found = [
        Box(label=own["label"], **dict(zip(CORNERS, own["box"], strict=True))) for own in boxes
    ]
    return PictureBoxes(size=(width, height), boxes=found)


def check_boxes(boxes: Any, size: Any) -> None:
    """Raises ValueError unless these values of a record are boxes within a picture."""
    if not isinstance(boxes, (list, tuple)) or not isinstance(size, (list, tuple)):
        raise ValueError("its boxes are no list")
    if not size and not boxes:
        return
    is_sound = len(size) == 2 and all(type(own) is int and 0 < own < MAX_PIXELS for own in size)
    if not is_sound:
        raise ValueError("its picture_size is not [width, height]")
    for own in boxes:
        if not _is_box(own, *size):
            raise ValueError(f"its box {str(own)[:40]!r} is none within its picture_size")


def _is_box(own: Any, width: int, height: int) -> bool:
    if not isinstance(own, dict) or set(own) != {"label", "box"}:
        return False
    box = own["box"]
    is_sound = isinstance(own["label"], str) and isinstance(box, (list, tuple)) and len(box) == 4
    if not is_sound or not all(type(side) in (int, float) for side in box):
        return False
    x0, y0, x1, y1 = box
    return bool(0 <= x0 < x1 <= width and 0 <= y0 < y1 <= height)
