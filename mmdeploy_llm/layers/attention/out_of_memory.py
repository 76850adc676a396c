"""Recognises errors that mean "out of memory", on any device."""

from __future__ import annotations

import errno

import torch

# Texts in RuntimeErrors that mean out of memory: from the CPU allocator, the driver and cuBLAS.
SIGNS = ("DefaultCPUAllocator", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` means that host or device memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)


def release_cached_memory(device: torch.device) -> None:
    """Returns memory that torch's CUDA allocator holds unused to the driver, which can then join
    the gaps between tensors."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
