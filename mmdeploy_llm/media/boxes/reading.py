"""Reads boxes of an answer by the rule of the model's family. Answers are strangers' text: half of
an object, numbers out of range, swapped corners and any number of boxes are no surprise."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from mmdeploy_llm.hooks.objects.boxes import BoxRule

Size = tuple[int, int]  # (width, height)

NUMBER = re.compile(r"(?<![\d.])-?\d{1,9}(?:\.\d{1,9})?(?![\d.])")
OBJECTS = re.compile(r"[{}]")
LABEL = re.compile(r'"(?:label|text_content|name|class|text)"\s*:\s*"((?:[^"\\]|\\.)*)"')
TAG = re.compile(r"<[^<>\n]{1,40}>")
MAX_LABEL = 500  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A box in a picture, in pixels of the file as it is shown: EXIF orientation applied.

    label: what the answer calls it, "" if it does not. x0, y0, x1, y1: left, top, right, bottom.
    """

    label: str
    x0: float
    y0: float
    x1: float
    y1: float

    def named(self, label: str) -> Box:
        """Returns it with another label."""
        return replace(self, label=label)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundBoxes:
    """The boxes of an answer, in the order of the text. size: of the picture, upright. num_unread:
    boxes that are half-written or without an area, and left out."""

    size: Size
    boxes: list[Box]
    num_unread: int = 0


def find_boxes(
    text: str, rule: BoxRule, size: Size, shown: Size | None = None, prompt: str = ""
) -> FoundBoxes:
    """Finds the boxes of an answer about a picture.

    size: of the picture, upright. shown: of the picture as the model sees it, where the rule counts
    its pixels. prompt: what was asked, where the rule tells kinds of boxes by it. Parts of a box
    outside the picture are cut off; one with swapped corners is the box between them.
    """
    width, height = shown or size
    spans = (rule.scale, rule.scale) if rule.scale is not None else (width, height)
    found, num_unread = [], 0
    for label, numbers in _raw(text, rule, prompt):
        if not numbers:
            num_unread += 1
            continue
        if rule.order == "yxyx":
            numbers = [numbers[place ^ 1] for place in range(len(numbers))]
        numbers = [number + rule.offset for number in numbers]
        xs = [_inside(number / spans[0] * size[0], size[0]) for number in numbers[::2]]
        ys = [_inside(number / spans[1] * size[1], size[1]) for number in numbers[1::2]]
        box = Box(label=label, x0=min(xs), y0=min(ys), x1=max(xs), y1=max(ys))
        if box.x1 > box.x0 and box.y1 > box.y0:
            found.append(box)
        else:
            num_unread += 1
    return FoundBoxes(size=size, boxes=found, num_unread=num_unread)


def read_boxes(text: str, rule: BoxRule, size: Size, shown: Size | None = None) -> list[Box]:
    """Returns the boxes that `find_boxes` finds."""
    return find_boxes(text, rule, size, shown).boxes


def _inside(value: float, most: int) -> float:
    return round(min(max(value, 0.0), float(most)), 2)


def _raw(text: str, rule: BoxRule, prompt: str) -> Iterator[tuple[str, list[float]]]:
    """Yields label and numbers of each box, as they are written; no numbers for one that is
    half-written."""
    count, has_json = _count(rule, prompt), False
    if rule.keys:
        names = "|".join(map(re.escape, rule.keys))
        key = re.compile(rf'"(?:{names})"\s*:\s*(\[[-\d\s.,\[\]]*)')
        for part in OBJECTS.split(text):
            label = LABEL.search(part)
            for match in key.finditer(part):
                has_json = True
                for numbers in _groups(match[1], count):
                    yield "" if label is None else _unquoted(label[1]), numbers
    if rule.pattern is None or has_json:
        return
    end = 0
    for match in re.finditer(rule.pattern, text):
        before = text[max(end, match.start() - 2 * MAX_LABEL) : match.start()]
        line = TAG.sub("", before.rpartition("\n")[2]).strip(" \t,.:;-")[:MAX_LABEL]
        end = match.end()
        named = match.groupdict()
        for numbers in _groups(named.get("box", match[0]), count):
            yield named.get("label", line).strip(), numbers


def _count(rule: BoxRule, prompt: str) -> int | None:
    """Returns how many numbers a box has; 0: all in a row; None: as they tell themselves."""
    if not rule.has_both:
        return 2 * rule.corners
    return next((count for task, count in rule.tasks if task in prompt), None)


def _groups(text: str, count: int | None) -> Iterator[list[float]]:
    """Yields the numbers of each box; none for one that is half-written. "[]" is no box. count: see
    _count."""
    numbers = [float(number) for number in NUMBER.findall(text)]
    size = _size(numbers) if count is None else count or max(4, len(numbers))
    for start in range(0, len(numbers), size):
        own = numbers[start : start + size]
        yield own if len(own) == size and size % 2 == 0 else []
    if not numbers and "]" not in text:
        yield []


def _size(numbers: list[float]) -> int:
    """Returns how many numbers in a row are one box: 4 where most are corners of boxes, whose
    second one is not left of the first or above it, 8 of quadrangles, else all, of one polygon. Of
    closed lines at most half of the sides run so."""
    pairs = zip(numbers[::4], numbers[1::4], numbers[2::4], numbers[3::4], strict=False)
    are_boxes = [x0 <= x1 and y0 <= y1 for x0, y0, x1, y1 in pairs]
    if 2 * sum(are_boxes) > len(are_boxes) or not are_boxes:
        return 4
    is_back = all(x3 < x2 for x2, x3 in zip(numbers[4::8], numbers[6::8], strict=False))
    return 8 if len(numbers) % 8 == 0 and is_back else max(4, len(numbers))


def _unquoted(text: str) -> str:
    if "\\" not in text:
        return text[:MAX_LABEL]
    try:
        found = json.loads(f'"{text}"')
    except ValueError:  # a line break, an escape that is none
        found = text
    return str(found)[:MAX_LABEL]


@runtime_checkable
class ShowsSize(Protocol):
    """A processor that says at which (width, height) the model sees a picture."""

    def shown_size(self, item: Any, options: Mapping[str, Any]) -> Size:
        """Returns it for what `count_tokens` accepts."""


def sizes_of(processor: object, known: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `size` and `shown` of a MediaInput. known: what a processor counts tokens of."""
    shown = processor.shown_size(known, options) if isinstance(processor, ShowsSize) else None
    return {"size": getattr(known, "size", None), "shown": shown}
