"""Writes boxes as others read them: COCO, YOLO, and SVG to lay over a picture."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from .reading import Box, Size

MAX_SHOWN, MAX_LABELLED = 300, 40  # boxes over one picture
MAX_LABEL = 40  # characters, of which a wide one counts as two
CARD, FONT = (260, 190), 11  # pixels of a picture on a page, and of the letters over it
COLOURS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080")


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """A picture with its boxes. name: of its file, relative to a folder of pictures."""

    name: str
    size: Size
    boxes: Sequence[Box]


def labels_of(pictures: Iterable[Labelled]) -> list[str]:
    """Returns the labels of all boxes, sorted; a box without one is an "object"."""
    return sorted({box.label or "object" for picture in pictures for box in picture.boxes})


def coco(pictures: Sequence[Labelled]) -> dict[str, Any]:
    """Returns a dataset in COCO's format: boxes are [left, top, width, height] in pixels, ids count
    from 1."""
    labels = labels_of(pictures)
    ids = {label: number for number, label in enumerate(labels, 1)}
    annotations: list[dict[str, Any]] = []
    for number, picture in enumerate(pictures, 1):
        for box in picture.boxes:
            width, height = round(box.x1 - box.x0, 2), round(box.y1 - box.y0, 2)
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": ids[box.label or "object"],
                    "bbox": [box.x0, box.y0, width, height],
                    "area": round(width * height, 2),
                    "iscrowd": 0,
                }
            )
    return {
        "images": [
            {"id": number, "file_name": one.name, "width": one.size[0], "height": one.size[1]}
            for number, one in enumerate(pictures, 1)
        ],
        "annotations": annotations,
        "categories": [{"id": ids[label], "name": label} for label in labels],
    }


def yolo_lines(picture: Labelled, classes: Mapping[str, int]) -> list[str]:
    """Returns a line for each box in YOLO's format: class, centre, width and height, as shares of
    the picture. classes: number of each label."""
    width, height = picture.size
    return [
        f"{classes[box.label or 'object']} {(box.x0 + box.x1) / 2 / width:.6f} "
        f"{(box.y0 + box.y1) / 2 / height:.6f} {(box.x1 - box.x0) / width:.6f} "
        f"{(box.y1 - box.y0) / height:.6f}"
        for box in picture.boxes
    ]


def svg(boxes: Sequence[Box], size: Size) -> str:
    """Returns an SVG of the boxes that covers a picture of this size, at most MAX_SHOWN of them, a
    colour for each label. More than MAX_LABELLED have their labels under the pointer only."""
    width, height = size
    unit = max(1.0, width / CARD[0], height / CARD[1])  # a pixel of the picture as it is shown
    colours: dict[str, str] = {}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" class="boxes">'
    ]
    for box in boxes[:MAX_SHOWN]:
        colour = colours.setdefault(box.label, COLOURS[len(colours) % len(COLOURS)])
        parts.append(
            f'<rect x="{box.x0}" y="{box.y0}" width="{box.x1 - box.x0:.2f}" '
            f'height="{box.y1 - box.y0:.2f}" fill="none" pointer-events="all" stroke="{colour}" '
            f'stroke-width="{1.5 * unit:.1f}"><title>{escape(box.label)}</title></rect>'
        )
        if box.label and len(boxes) <= MAX_LABELLED:
            parts.append(_label(box, width, unit, colour))
    return "".join([*parts, "</svg>"])


def _short(label: str) -> str:
    """Returns what a label shows: wide characters, as those of Chinese, count twice."""
    width = 0
    for index, char in enumerate(label):
        width += 2 if unicodedata.east_asian_width(char) in "WF" else 1
        if width > MAX_LABEL:
            return f"{label[:index]}\u2026"
    return label


def _label(box: Box, width: int, unit: float, colour: str) -> str:
    """Returns the label above a box, or inside of one that begins at the top; that of a box on the
    right ends where the box does."""
    above = box.y0 - 3 * unit
    y = above if above > FONT * unit else box.y0 + FONT * unit
    is_right = box.x0 > 0.6 * width
    x, anchor = (box.x1, "end") if is_right else (box.x0, "start")
    return (
        f'<text x="{x}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}" '
        f'font-size="{FONT * unit:.1f}">{escape(_short(box.label))}</text>'
    )
