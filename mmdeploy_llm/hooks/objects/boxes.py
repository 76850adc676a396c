"""BoxRule: how the models of a family write boxes into their answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Order = Literal["xyxy", "yxyx"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxRule:
    """How boxes are written.

    keys: names of the coordinates in JSON objects; (): the models write no JSON.
    pattern: expression for the numbers of boxes in other text, which must take linear time; the
        label is what stands before them in their line, without tags, or in the pattern's group
        `label`, beside a group `box`. None: there are none.
    scale: the numbers go from 0 to this over the picture; None: they are pixels of the picture as
        the model sees it.
    order: of the four numbers of a box.
    corners: points of a box: 2, or 4 of a quadrangle, of which the upright rectangle is taken.
    has_both: boxes of 2 points, quadrangles and polygons occur, in a row without words between
        them only those of one kind. Where `tasks` does not say which, most boxes do not run back,
        the last side of a quadrangle runs left, and anything else is one polygon, of which the
        upright rectangle is taken.
    tasks: words in a prompt -> how many numbers a box has that answers it: 4, 8, or 0 for a polygon
        of all in a row. For rules with `has_both`.
    offset: added to each number: 0.5 where it names a bin, whose middle is meant.
    is_special: the numbers are special tokens, so that answers need skip_special_tokens=False.
    """

    keys: tuple[str, ...] = ()
    pattern: str | None = None
    scale: int | None = 1000
    order: Order = "xyxy"
    corners: Literal[2, 4] = 2
    has_both: bool = False
    tasks: tuple[tuple[str, int], ...] = ()
    offset: float = 0.0
    is_special: bool = False
