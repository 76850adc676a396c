"""Convolutions that compute in float32 where the CPU has no products of their dtype.

Without them torch 2.13 leaves a convolution to loops of its own: on a CPU with AVX2 alone a layer
of Whisper's takes 27 times as long in bfloat16, and 25 times in float16, as in float32 with both
conversions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor, nn

from mmdeploy_llm.layers import has_product


class _WideSums:
    """Computes what the class after it computes; see the module."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        compute: Callable[..., Tensor] = super()._conv_forward  # type: ignore[misc]
        if not input.is_cpu or has_product(input.dtype):
            return compute(input, weight, bias)
        wide = compute(input.float(), weight.float(), None if bias is None else bias.float())
        return wide.to(input.dtype)


class WideConv1d(_WideSums, nn.Conv1d):
    """A torch.nn.Conv1d."""


class WideConv2d(_WideSums, nn.Conv2d):
    """A torch.nn.Conv2d."""


class WideConv3d(_WideSums, nn.Conv3d):
    """A torch.nn.Conv3d."""


WIDE: Mapping[type[nn.Module], type[nn.Module]] = MappingProxyType(
    {nn.Conv1d: WideConv1d, nn.Conv2d: WideConv2d, nn.Conv3d: WideConv3d}
)


def widen_convolutions(model: nn.Module) -> None:
    """Changes the convolutions of `model` in place; those of a class of transformers' own stay."""
    for module in model.modules():
        if (wide := WIDE.get(type(module))) is not None:
            module.__class__ = wide  # keeps parameters, hooks and whatever their parents have set
