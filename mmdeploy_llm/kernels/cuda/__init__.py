"""Triton kernels for CUDA: work for which torch has no single operation.

triton is imported in this folder alone, and only when kernels are loaded; without it the plain
torch paths compute the same. Triton 3.6 to 3.9: the CUDA builds of torch 2.11 to 2.13 bring 3.6
or 3.7.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from mmdeploy_llm.kernels.cpu import CpuKernels

    from .cuda_kernels import CudaKernels

__all__ = ["load"]

logger = logging.getLogger(__name__)


def load(device: torch.device, rounder: CpuKernels | None = None) -> CudaKernels | None:
    """Returns the kernels for a CUDA device; None, with a warning, where triton cannot be imported.
    rounder: rounds weights while they are loaded."""
    try:
        from .cuda_kernels import CudaKernels
    except ImportError as error:
        logger.warning("no Triton kernels, plain torch computes the same more slowly: %s", error)
        return None
    return CudaKernels(device, rounder)
