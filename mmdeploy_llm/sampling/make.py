"""Which sampler an engine has."""

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
    """has_triton: whether the device's kernels are in use; the sampler is a DeviceSampler then."""
    if has_triton:
        from .device import DeviceSampler

        return DeviceSampler(
            max_num_slots=max_num_slots, vocab_size=vocab_size, device=device, grammars=grammars
        )
    return Sampler(
        max_num_slots=max_num_slots,
        vocab_size=vocab_size,
        device=device,
        grammars=grammars,
        kernels=kernels,
    )
