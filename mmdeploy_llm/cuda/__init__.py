"""Triton kernels for CUDA: what torch has no single operation for.

triton is imported in this folder alone, and only when kernels are asked for; without it the plain
torch paths compute the same.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .kernels import CudaKernels

__all__ = ["load"]

logger = logging.getLogger(__name__)


def load(device: torch.device) -> CudaKernels | None:
    """The kernels for a CUDA device; None, which is told, where triton cannot be imported."""
    try:
        from .kernels import CudaKernels
    except ImportError as error:
        logger.warning("no Triton kernels, plain torch computes the same more slowly: %s", error)
        return None
    return CudaKernels(device)
