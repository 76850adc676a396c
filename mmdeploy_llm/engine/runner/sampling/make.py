"""Builds the sampler of an engine."""

from __future__ import annotations

import torch

from mmdeploy_llm.kernels import Kernels

from .grammar import GrammarBackend
from .processors import LogitsProcessors
from .sampler import Sampler


def make_sampler(
    *,
    max_num_slots: int,
    vocab_size: int,
    device: torch.device,
    grammars: GrammarBackend | None,
    processors: LogitsProcessors | None,
    kernels: Kernels,
) -> Sampler:
    """Builds a CudaSampler for kernels that sample on the device, else a Sampler."""
    if kernels.samples_on_device:
        from .cuda_sampler import CudaSampler

        return CudaSampler(
            max_num_slots=max_num_slots,
            vocab_size=vocab_size,
            device=device,
            grammars=grammars,
            processors=processors,
        )
    return Sampler(
        max_num_slots=max_num_slots,
        vocab_size=vocab_size,
        device=device,
        grammars=grammars,
        processors=processors,
        kernels=kernels,
    )
