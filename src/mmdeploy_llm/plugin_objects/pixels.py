"""Says what media processors may compute pixels with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class PixelKernels(Protocol):
    """The CPU kernels for pixels."""

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
