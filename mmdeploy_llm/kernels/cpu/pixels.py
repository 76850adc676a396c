"""Pixels: patch rows and sizes of images; see hooks.PixelKernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .library import Library

if TYPE_CHECKING:
    from mmdeploy_llm.hooks.objects.pixels import ResizeTaps

STRIP_BYTES = 48  # as in pixels.h


class Pixels(Library):
    """Implements hooks.PixelKernels with the C++ library."""

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
        assert all(x.is_contiguous() for x in (pixels, table, out))
        self._library.patchify(
            pixels=pixels,
            height=pixels.shape[0],
            width=pixels.shape[1],
            patch=patch_size,
            merge=merge_size,
            table=table,
            frames=out.shape[2],
            first=frames.start,
            count=len(frames),
            out=out,
        )

    def resize(
        self,
        pixels: Tensor,
        out: Tensor,
        across: ResizeTaps,
        down: ResizeTaps,
        *,
        is_down_first: bool,
    ) -> None:
        assert all(x.is_contiguous() for x in (pixels, out, across.weights, down.weights))
        height, width, _ = pixels.shape
        rows, columns, _ = out.shape
        size = rows * width if is_down_first else height * columns
        self._library.resize(
            pixels=pixels,
            height=height,
            width=width,
            across_first=across.first,
            across_counts=across.counts,
            across_weights=across.weights,
            across_most=across.weights.shape[1],
            down_first=down.first,
            down_counts=down.counts,
            down_weights=down.weights,
            down_most=down.weights.shape[1],
            rows=rows,
            columns=columns,
            is_down_first=is_down_first,
            # numpy allocates in large pages.
            turned=torch.from_numpy(np.empty(width * STRIP_BYTES + 1, dtype=np.uint8)),
            middle=torch.from_numpy(np.empty(size * 3, dtype=np.uint8)),
            out=out,
        )
