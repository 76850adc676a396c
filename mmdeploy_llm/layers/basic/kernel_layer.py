"""KernelLayer: the base of layers that compute with kernels."""

from __future__ import annotations

from torch import nn

from mmdeploy_llm.kernels import TORCH, Kernels


class KernelLayer(nn.Module):
    """A layer that is faster with compiled kernels. kernels: set by install_kernels; before that
    the layer computes in plain torch, which is the reference."""

    kernels: Kernels = TORCH
