"""What a layer needs to be faster with the CPU kernels."""

from __future__ import annotations

from torch import nn

from mmdeploy_llm.native import Kernels


class WithKernels(nn.Module):
    """A layer that is faster with kernels. kernels: set by `use_kernels`, None before."""

    kernels: Kernels | None = None
