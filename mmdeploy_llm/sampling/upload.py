"""Small arrays on their way to the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """On CUDA through pinned memory, so that the copy does not stop the host."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_all(arrays: Sequence[NDArray[np.generic]], device: torch.device) -> Iterator[Tensor]:
    """As `upload` of each, in one copy. None is empty; each but the last has a whole
    number of 8 bytes."""
    flat = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
    parts = torch.split(upload(np.concatenate(flat), device), [len(part) for part in flat])
    for array, part in zip(arrays, parts, strict=True):
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        yield part.view(dtype).view(array.shape)
