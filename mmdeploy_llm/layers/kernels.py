"""Kernels reach the layers that have a use for them; without them every layer computes the same in
plain torch, which is the reference."""

from __future__ import annotations

from torch import nn

from mmdeploy_llm.native import Kernels

from .decoder import CausalLM
from .linear import Linear
from .moe import Experts
from .packed import Quantization
from .with_kernels import DeviceKernels, WithKernels

AnyKernels = Kernels | DeviceKernels


def use_kernels(
    model: nn.Module, kernels: AnyKernels, quantization: Quantization | None = None
) -> None:
    """From now on the layers of `model` compute with `kernels` where these take the tensors.

    For the CPU's, linear layers and experts are packed too; quantization="int8" rounds their
    weights, and rows of x as they come.
    """
    for module in model.modules():
        if isinstance(module, WithKernels):
            module.kernels = kernels
            module.device_kernels = None if isinstance(kernels, Kernels) else kernels
    if isinstance(kernels, Kernels):
        _pack(model, kernels, quantization)


def _pack(model: nn.Module, kernels: Kernels, quantization: Quantization | None) -> None:
    for module in model.modules():
        if isinstance(module, Linear | Experts):
            module.pack(kernels, quantization)
    # The largest one last: in int8 it needs memory of its own, which the others have given back.
    for module in model.modules():
        if isinstance(module, CausalLM) and module.lm_head is None:
            module.model.embed_tokens.pack(kernels, quantization)
