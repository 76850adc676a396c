"""Says what media processors may compute pixels with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResizeTaps:
    """Says of each pixel of a resized line which pixels it is the weighted sum of: `counts` [n]
    from number `first` [n] on, with `weights` [n, most] in 2^-22; all int32 and contiguous."""

    first: Tensor
    counts: Tensor
    weights: Tensor


class PixelKernels(Protocol):
    """The CPU kernels for pixels. can_resize: whether `resize` is faster than Pillow."""

    can_resize: bool

    def patchify(
        self,
        pixels: Tensor,
        table: Tensor,
        out: Tensor,
        *,
        patch_size: int,
        merge_size: int,
        frames: range,
    ) -> None:
        """Looks up uint8 `pixels` [H, W, 3] in `table` [3, 256] float32 and writes the values into
        `frames` of the patch rows `out` [N, 3, T, P, P] float32.

        All tensors are contiguous. Patches are ordered in blocks of merge_size x merge_size.
        """

    def resize(
        self,
        pixels: Tensor,
        out: Tensor,
        across: ResizeTaps,
        down: ResizeTaps,
        *,
        is_down_first: bool,
    ) -> None:
        """Resizes uint8 `pixels` [H, W, 3] to `out` [h, w, 3] across and down, rounded to uint8
        after each direction. All tensors are contiguous; W and w are at least 22."""
