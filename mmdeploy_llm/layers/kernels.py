"""The CPU kernels reach the layers that have a use for them; without them every layer computes the
same in plain torch, which is the reference."""

from __future__ import annotations

from torch import nn

from mmdeploy_llm.native import Kernels


class WithKernels(nn.Module):
    """A layer that is faster with kernels. kernels: set by `use_kernels`, None before."""

    kernels: Kernels | None = None


def use_kernels(model: nn.Module, kernels: Kernels) -> None:
    """From now on the layers of `model` compute with `kernels` where these take the tensors."""
    for module in model.modules():
        if isinstance(module, WithKernels):
            module.kernels = kernels
