"""KernelLayer: the base of layers that compute with kernels if there are any."""

from __future__ import annotations

from torch import nn

from mmdeploy_llm.kernels import Kernels


class KernelLayer(nn.Module):
    """A layer that is faster with kernels. kernels: set by install_kernels; None: the layer
    computes in plain torch, which is the reference."""

    kernels: Kernels | None = None
