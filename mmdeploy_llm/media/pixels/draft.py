"""JPEG at draft quality (`fast_decode`): fewer pixels are decoded, and they are resized with SIMD.

Decoding: a JPEG holds blocks of 8 x 8 frequencies. libjpeg can decode only the lowest 4 x 4, 2 x 2
or one of each block, which skips most of the work and returns 1/2, 1/4 or 1/8 of the size.
Resizing: torch's kernel for 8-bit pixels has Pillow's filters with weights of 16 bits instead of
22; few values differ, by one or two levels of 255.
"""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
import torch
from PIL import Image

from .patches import to_array

# The operators that torch.nn.functional.interpolate(..., antialias=True) calls.
TORCH_FILTERS = MappingProxyType(
    {
        Image.Resampling.BILINEAR: "_upsample_bilinear2d_aa",
        Image.Resampling.BICUBIC: "_upsample_bicubic2d_aa",
    }
)


def resize_draft(image: Image.Image, height: int, width: int, resample: int) -> np.ndarray:
    """Resizes the RGB image to uint8 [height, width, 3]. resample: Pillow's filter number."""
    if image.size == (width, height):
        return to_array(image)
    name = TORCH_FILTERS.get(Image.Resampling(resample))
    if name is None:
        return to_array(image.resize((width, height), resample=Image.Resampling(resample)))
    # numpy allocates in large pages; allocating the result in torch costs as much as the resizing.
    resized = np.empty((height, width, 3), dtype=np.uint8)
    function = getattr(torch.ops.aten, name).out
    function(_planes(to_array(image)), [height, width], False, None, None, out=_planes(resized))
    return resized


def _planes(pixels: np.ndarray) -> torch.Tensor:
    """Views [H, W, 3] as [1, 3, H, W] in channels-last memory."""
    return torch.from_numpy(pixels).permute(2, 0, 1)[None]
