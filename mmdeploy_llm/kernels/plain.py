"""Operations in plain torch: what Kernels computes where no compiled kernel does.

Rows of a step are computed in chunks, so that temporaries on the CPU stay small: malloc maps a
temporary of a few megabytes anew at every use, and touching its pages costs several times the
arithmetic; small ones are reused and stay in the CPU cache.

Shapes: T tokens, N heads, D head size, R rotary channels of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

# transformers' names
ActivationName = Literal["gelu", "gelu_pytorch_tanh", "quick_gelu", "silu", "relu", "relu2"]
MAX_VALUES = 2**18  # in a float32 temporary
TILE = 64  # products are fastest on whole tiles of rows
ROTATED_VALUES = 64  # of a block, at most, as kernels/cpp/products/hadamard.h has them


def hadamard(size: int) -> Tensor:
    """Returns the orthogonal Hadamard matrix [b, b] float32 of the largest power of two that
    divides `size`, at most ROTATED_VALUES. It is symmetric, so it is its own inverse."""
    block = min(size & -size, ROTATED_VALUES)
    matrix = torch.ones(1, 1)
    while len(matrix) < block:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(block)


def row_chunks(x: Tensor, row_size: int, max_values: int) -> list[slice]:
    """Splits the rows of `x` [T, ...] into slices of at most max_values // row_size rows, but at
    least one tile; one slice when `x` is not on the CPU."""
    num_rows = x.shape[0]
    step = max(TILE, max_values // row_size // TILE * TILE)
    if num_rows <= step or not x.is_cpu:
        return [slice(0, num_rows)]
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


# A weight is widened in parts of this many values, which stay in the cache and in freed memory that
# is used again, or of this many rows, fewer of which make slow products.
WIDE_VALUES = 2**20
MIN_WIDE_ROWS = 512


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Multiplies x [..., k] by `weight` [n, k], both of one dtype. dtype: of the result, float32 or
    for None that of x. On a CPU where torch has no product in the dtype, or rounds what is to be
    kept, it multiplies in float32, which has the same result up to rounding and is up to hundreds
    of times faster for more than one row."""
    if dtype not in (None, x.dtype):
        out = _wide_sums(x, weight)
    elif x.numel() == x.shape[-1] or not x.is_cpu or has_product(x.dtype):
        return F.linear(x, weight, bias)
    else:
        out = _sums_on_cpu(x, weight)
    return (out if bias is None else out.add_(bias)).to(dtype or x.dtype)


def _wide_sums(x: Tensor, weight: Tensor) -> Tensor:
    if x.is_cpu:
        return _sums_on_cpu(x, weight)
    flat = x.reshape(-1, x.shape[-1])
    return torch.mm(flat, weight.t(), out_dtype=torch.float32).view(*x.shape[:-1], -1)


def _sums_on_cpu(x: Tensor, weight: Tensor) -> Tensor:
    wide, num_rows = x.float(), max(MIN_WIDE_ROWS, WIDE_VALUES // weight.shape[1])
    parts = [F.linear(wide, part.float()) for part in torch.split(weight, num_rows)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def has_product(dtype: torch.dtype) -> bool:
    """Whether torch's products on this CPU use instructions for `dtype`."""
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is not torch.float16 or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def quick_gelu(x: Tensor) -> Tensor:
    """Computes x * sigmoid(1.702 x)."""
    return (x * 1.702).sigmoid_().mul_(x)


def relu2(x: Tensor) -> Tensor:
    """Computes relu(x) ** 2."""
    return F.relu(x).square_()


ACTIVATIONS: Mapping[ActivationName, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "gelu": F.gelu,
        "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
        "quick_gelu": quick_gelu,
        "relu": F.relu,
        "relu2": relu2,
        "silu": F.silu,
    }
)


def rms_norm(x: Tensor, weight: Tensor, eps: float, centre: float | None) -> Tensor:
    """Computes Kernels.rms_norm without a residual. CUDA uses torch's fused kernel where it rounds
    alike, or once less in bf16: it applies the weight before the cast."""
    if x.is_cuda and not centre:
        return F.rms_norm(x, weight.shape, weight, eps)
    if centre is not None:
        return (_normed(x.float(), eps) * (centre + weight.float())).to(x.dtype)
    chunks = row_chunks(x, math.prod(x.shape[1:]), MAX_VALUES)
    if len(chunks) == 1:
        return _rms_norm(x, weight, eps)
    out = torch.empty_like(x)
    for rows in chunks:
        out[rows] = _rms_norm(x[rows], weight, eps)
    return out


def _normed(wide: Tensor, eps: float) -> Tensor:
    """Norms float32 rows without a weight."""
    return wide * wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rounds before the weight multiplies, without writing to `x`."""
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    normed = wide * scale if wide is x else wide.mul_(scale).to(x.dtype)
    return normed.mul_(weight)


def normed_heads(x: Tensor, eps: float) -> Tensor:
    """Computes Kernels.normed_heads."""
    return _normed(x.float(), eps).to(x.dtype)


def angles(
    positions: Tensor,
    frequencies: Tensor,
    axes: Tensor | None,
    scale: float,
    is_long: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Computes Kernels.angles."""
    own = frequencies[0 if is_long is None else is_long.long()]
    if axes is None:
        per_pair = positions[:, None].float()
    else:
        per_pair = positions[axes].T.float().contiguous()
    products = per_pair * own  # [T, R / 2]
    cos, sin = products.cos(), products.sin()
    return (cos, sin) if scale == 1.0 else (cos * scale, sin * scale)


def mix_heads(
    x: Tensor, matrix: Tensor, centres: Tensor | None = None, factors: Tensor | None = None
) -> Tensor:
    """See Kernels.mix_heads."""
    out = x.float()
    if centres is not None:
        out = out - centres.repeat_interleave(x.shape[1] // len(centres), 0)
    if factors is not None:
        out = out * factors.repeat_interleave(x.shape[1] // len(factors), 0)
    blocks = out.reshape(*x.shape[:2], x.shape[2] // len(matrix), len(matrix)) @ matrix
    return blocks.flatten(-2).to(x.dtype)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor, *, is_interleaved: bool) -> Tensor:
    """Returns x [T, N, D] with the first R channels of every head rotated, chunk by chunk in
    float32."""
    size = 2 * cosines.shape[-1]
    heads = x[..., :size]
    chunks = row_chunks(heads, heads.shape[1] * size, MAX_VALUES)
    function = _rotate_interleaved if is_interleaved else _rotate_halves
    if len(chunks) == 1:
        out = function(heads.float(), cosines, sines).to(x.dtype)
    else:
        out = torch.empty(heads.shape, dtype=x.dtype, device=x.device)
        for rows in chunks:
            out[rows] = function(heads[rows].float(), cosines[rows], sines[rows])
    return out if size == x.shape[-1] else torch.cat([out, x[..., size:]], -1)


def _rotate_halves(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotates the pairs (c, c + R / 2)."""
    rolled = torch.roll(x, x.shape[-1] // 2, -1)
    cos = torch.cat([cosines, cosines], -1)[:, None]
    return rolled.mul_(torch.cat([-sines, sines], -1)[:, None]).addcmul_(x, cos)


def _rotate_interleaved(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotates the pairs (2 c, 2 c + 1), as products of complex numbers."""
    pairs = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
    unit = torch.complex(cosines, sines)[:, None]
    return torch.view_as_real(pairs.mul_(unit)).flatten(-2)
