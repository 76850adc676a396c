"""KernelLayer: the base of layers that compute with kernels if there are any; `scaled`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmdeploy_llm.kernels import ActivationKernels, Kernels
from mmdeploy_llm.kernels.mixtures import MixtureKernels


class KernelLayer(nn.Module):
    """A layer that is faster with kernels. kernels: set by install_kernels; None: the layer
    computes in plain torch, which is the reference."""

    kernels: Kernels | None = None


def activation_kernels(kernels: Kernels | None, *tensors: Tensor) -> ActivationKernels | None:
    """Returns the kernels of activations, if there are any for tensors like these."""
    if kernels is None or kernels.activations is None or not kernels.takes(*tensors):
        return None
    return kernels.activations


def mixture_kernels(kernels: Kernels | None, x: Tensor) -> MixtureKernels | None:
    """Returns the kernels of routers and experts, if there are any for rows like these."""
    if kernels is None or not kernels.takes(x) or not x.is_contiguous():
        return None
    return kernels.mixtures


def scaled(x: Tensor, factor: float, kernels: Kernels | None, *, rounds: bool = False) -> Tensor:
    """Returns x * factor, with kernels in the memory of `x`. rounds: whether the factor is rounded
    to x's dtype first."""
    own = activation_kernels(kernels, x)
    if own is not None and x.is_contiguous():
        return own.scale(x, factor, rounds=rounds)
    return x * (torch.tensor(factor, dtype=x.dtype) if rounds else factor)


def added(to: Tensor, x: Tensor, kernels: Kernels | None, gate: Tensor | None = None) -> Tensor:
    """Returns to + x, both [T, size], in the memory of `to`; with a gate [T, 1]
    to + x * sigmoid(gate)."""
    own = activation_kernels(kernels, to, x, *(() if gate is None else (gate,)))
    if own is not None and to.is_contiguous():
        return own.add_rows(to, x, gate)
    return to.add_(x if gate is None else gate.sigmoid_() * x)


def multiplied(x: Tensor, y: Tensor, kernels: Kernels | None) -> Tensor:
    """Returns x * y, both [T, size]."""
    own = activation_kernels(kernels, x, y)
    return x * y if own is None else own.gated_mul(x, y, None)


# Products are fastest on whole tiles of rows.
TILE = 64


def row_chunks(x: Tensor, row_size: int, max_values: int) -> list[slice]:
    """Splits the rows of `x` [T, ...] into slices of at most max_values // row_size rows, but at
    least one tile; one slice when `x` is not on the CPU."""
    num_rows = x.shape[0]
    step = max(TILE, max_values // row_size // TILE * TILE)
    if num_rows <= step or not x.is_cpu:
        return [slice(0, num_rows)]
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]
