"""Converts numpy arrays and torch tensors to RGB images."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from mmdeploy_llm.errors import MediaError, UnsupportedMediaError

from .modes import on_white
from .numbers import ROUNDING, scale_bits

if TYPE_CHECKING:
    from torch import Tensor

CHANNELS = (1, 3, 4)
ACCEPTED = (
    "a PIL image, bytes, a file object, a path, a data: URL, a numpy array or a torch tensor of "
    "shape [H, W], [H, W, 1|3|4] or [1|3|4, H, W] with uint8, uint16, bool or floats in 0..1, "
    "one image per item"
)


def array_size(source: Any) -> tuple[int, int]:
    """Returns (width, height) of an array or tensor. Raises UnsupportedMediaError for all else."""
    shape = _shape(source)
    height, width = shape if len(shape) == 2 else _spatial(shape, _is_channels_first(source))
    return width, height


def array_to_rgb(source: Any) -> Image.Image:
    """Converts an array or tensor to an RGB image; the source is not changed.

    Where both would fit, numpy arrays are read as [H, W, C] and torch tensors as [C, H, W].
    Raises MediaError for floats outside 0..1, UnsupportedMediaError for other types and shapes.
    """
    is_channels_first = len(_shape(source)) == 3 and _is_channels_first(source)
    values = _to_uint8(_numpy(source))
    if is_channels_first:
        values = values.transpose(1, 2, 0)
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[:, :, 0]
    image = Image.fromarray(np.ascontiguousarray(values))
    return on_white(image) if image.mode == "RGBA" else image.convert("RGB")


def _is_tensor(source: Any) -> bool:
    """Returns whether it is a tensor of torch, which somebody has then imported: what decodes files
    alone, as a report does, need not."""
    found = getattr(sys.modules.get("torch"), "Tensor", None)
    return found is not None and isinstance(source, found)


def _shape(source: Any) -> tuple[int, ...]:
    if not isinstance(source, np.ndarray) and not _is_tensor(source):
        raise UnsupportedMediaError(
            f"an image of type {type(source).__name__} is not accepted; give {ACCEPTED}"
        )
    shape = tuple(source.shape)
    fits = len(shape) == 2 or (len(shape) == 3 and (shape[0] in CHANNELS or shape[2] in CHANNELS))
    if not fits:
        raise UnsupportedMediaError(
            f"an image of shape {list(shape)} is not accepted; give {ACCEPTED}"
        )
    return shape


def _is_channels_first(source: Any) -> bool:
    """Returns whether three dimensions are [C, H, W]; where both orders fit, only for tensors."""
    first, last = source.shape[0] in CHANNELS, source.shape[-1] in CHANNELS
    return first and (_is_tensor(source) or not last)


def _spatial(shape: tuple[int, ...], is_channels_first: bool) -> tuple[int, ...]:
    return shape[1:] if is_channels_first else shape[:2]


def _numpy(source: Any) -> np.ndarray:
    if isinstance(source, np.ndarray):
        return source
    import torch

    if source.layout is not torch.strided or source.is_meta or source.is_quantized:
        raise UnsupportedMediaError(
            "a sparse, quantized or meta tensor is not an image; give a plain one"
        )
    tensor: Tensor = source.detach().cpu().resolve_conj().resolve_neg()
    return tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy()


def _to_uint8(values: np.ndarray) -> np.ndarray:
    if not values.dtype.isnative:
        values = values.astype(values.dtype.newbyteorder("="))
    if values.dtype == np.uint8:
        return values
    if values.dtype == np.bool_:
        return values.astype(np.uint8) * 255
    if values.dtype == np.uint16:
        return scale_bits(values, 16)
    if not np.issubdtype(values.dtype, np.floating):
        raise UnsupportedMediaError(
            f"an image of dtype {values.dtype} is not accepted; give uint8, uint16, bool or floats "
            "in 0..1"
        )
    low, high = float(values.min()), float(values.max())
    if not (low >= -ROUNDING and high <= 1 + ROUNDING):  # false for NaN as well
        raise MediaError(
            f"an image of floats must lie in 0..1, found {low:g} to {high:g}; divide it by its "
            "range or give uint8"
        )
    return np.rint(np.clip(values.astype(np.float32), 0, 1) * 255).astype(np.uint8)
