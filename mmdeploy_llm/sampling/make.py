"""Makes the sampler of an engine."""

from __future__ import annotations

import torch

from mmdeploy_llm.native import Kernels

from .grammar import GrammarBackend
from .sampler import Sampler


def make_sampler(
    *,
    max_num_slots: int,
    vocab_size: int,
    device: torch.device,
    grammars: GrammarBackend | None,
    kernels: Kernels | None,
    has_triton: bool,
) -> Sampler:
    """kernels: of the CPU, see Sampler. has_triton: whether the Triton kernels are in use, which
    makes it a CudaSampler."""
    if has_triton:
        from .cuda_sampler import CudaSampler

        return CudaSampler(
            max_num_slots=max_num_slots, vocab_size=vocab_size, device=device, grammars=grammars
        )
    return Sampler(
        max_num_slots=max_num_slots,
        vocab_size=vocab_size,
        device=device,
        grammars=grammars,
        kernels=kernels,
    )
