"""Matrix products with packed weights, in bf16 and int8. Packed weights lie in panels of 64 rows,
with four bytes of each row side by side."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmdeploy_llm.kernels import PackedWeight, Quantization

from .library import DTYPES, Library

PANEL = 64  # rows of a panel, as in gemm.h


class Products(Library):
    """Packs weights and multiplies by them."""

    def can_pack(self, weight: Tensor, quantization: Quantization | None) -> bool:
        """Whether `pack` lays out a weight [..., n, k] like this."""
        is_even_bf16 = weight.dtype is torch.bfloat16 and weight.shape[-1] % 2 == 0
        return self.takes(weight) and (quantization is not None or is_even_bf16)

    def pack(self, weight: Tensor, quantization: Quantization | None) -> PackedWeight | None:
        """Lays `weight` [n, k] out for products, rounded to int8 if requested; None where
        `can_pack` is False. Without rounding, the memory of `weight` is reused: its values are
        lost."""
        if not self.can_pack(weight, quantization):
            return None
        return S8Weight(self, weight) if quantization else Bf16Weight(self, weight)

    def pack_bf16(self, weight: Tensor) -> Tensor:
        """Lays out bf16 `weight` [n, k], contiguous, k even, for `linear_bf16`. Reuses the memory
        of `weight` when n is a multiple of 64, so that a model needs no second copy of its
        weights."""
        n, k = weight.shape
        shape = (-(-n // PANEL), k // 2, PANEL, 2)
        packed = self.memory.empty(shape, dtype=weight.dtype) if n % PANEL else weight.view(shape)
        self._library.mm_pack_bf16(
            weight.data_ptr(), n, k, packed.data_ptr(), torch.get_num_threads()
        )
        return packed

    def linear_bf16(self, x: Tensor, packed: Tensor, n: int, bias: Tensor | None) -> Tensor:
        """Multiplies bf16 `x` [T, k] by packed weights -> [T, n]. bias: [n] bf16."""
        out = self._empty((x.shape[0], n), dtype=x.dtype)
        self._library.mm_linear_bf16(
            x.data_ptr(),
            x.stride(0),
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            n,
            x.shape[1],
            torch.get_num_threads(),
            None,
            0,
        )
        return out

    def pack_f32(self, weight: Tensor) -> Tensor:
        """Lays out float32 `weight` [n, k], contiguous, for `linear_f32`; see `pack_bf16`."""
        n, k = weight.shape
        shape = (-(-n // PANEL), k, PANEL, 1)
        packed = self.memory.empty(shape, dtype=weight.dtype) if n % PANEL else weight.view(shape)
        self._library.mm_pack_f32(
            weight.data_ptr(), n, k, packed.data_ptr(), torch.get_num_threads()
        )
        return packed

    def linear_f32(self, x: Tensor, packed: Tensor, n: int, bias: Tensor | None) -> Tensor:
        """Multiplies float32 `x` [T, k] by packed weights -> [T, n]. bias: [n] float32."""
        out = self._empty((x.shape[0], n), dtype=x.dtype)
        self._library.mm_linear_f32(
            x.data_ptr(),
            x.stride(0),
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            n,
            x.shape[1],
            torch.get_num_threads(),
            None,
            0,
        )
        return out

    def pack_s8(self, weight: Tensor) -> Tensor:
        """Lays out int8 `weight` [n, k], contiguous, for `linear_s8`."""
        weight = F.pad(weight, (0, -weight.shape[1] % 4))
        n, k = weight.shape
        packed = self.memory.empty((-(-n // PANEL), k // 4, PANEL, 4), dtype=torch.uint8)
        self._library.mm_pack_s8(
            weight.data_ptr(), n, k, packed.data_ptr(), torch.get_num_threads()
        )
        return packed

    def quantize_rows(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Rounds `weight` [n, k], contiguous, to int8 [n, k] with a scale for each row, [n]
        float32: the largest magnitude of a row becomes 127."""
        n, k = weight.shape
        rounded = torch.empty(n, k, dtype=torch.int8)
        scales = torch.empty(n)
        self._library.mm_quantize_rows(
            DTYPES[weight.dtype],
            weight.data_ptr(),
            n,
            k,
            rounded.data_ptr(),
            scales.data_ptr(),
            torch.get_num_threads(),
        )
        return rounded, scales

    def linear_s8(self, x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """Multiplies `x` [T, k], quantised with a scale for every 128 values of a row, by packed
        weights -> [T, n]. scales: [n] float32, of the weight's rows. bias: [n] of x's dtype."""
        out = self._empty((x.shape[0], scales.shape[0]), dtype=x.dtype)
        self._library.mm_linear_s8(
            DTYPES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            packed.data_ptr(),
            scales.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            scales.shape[0],
            x.shape[1],
            torch.get_num_threads(),
            None,
            0,
        )
        return out


class Bf16Weight:
    """A kernels.PackedWeight with its values unchanged."""

    def __init__(self, kernels: Products, weight: Tensor) -> None:
        """weight: [n, k] bf16, k even; its memory is reused."""
        self._kernels = kernels
        self._num_rows = weight.shape[0]
        self._panels = kernels.pack_bf16(weight.contiguous())  # [n / 64, k / 2, 64, 2]

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiplies x [T, k] bf16 -> [T, n]."""
        return self._kernels.linear_bf16(x, self._panels, self._num_rows, bias)

    def rows(self, indices: Tensor) -> Tensor:
        """Looks up rows, [T] -> [T, k]."""
        panels = torch.div(indices, PANEL, rounding_mode="floor")
        return self._panels[panels, :, indices % PANEL].flatten(1)


class S8Weight:
    """A kernels.PackedWeight in int8 with a scale for each row; x is rounded to int8 too, with a
    scale for every 128 values of a row. Both are symmetric: the largest magnitude becomes 127."""

    rows = None  # the layout rounds them

    def __init__(self, kernels: Products, weight: Tensor) -> None:
        """weight: [n, k] float32 or bf16."""
        self._kernels = kernels
        rounded, self._scales = kernels.quantize_rows(weight.contiguous())
        self._panels = kernels.pack_s8(rounded)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiplies x [T, k] -> [T, n]."""
        return self._kernels.linear_s8(x, self._panels, self._scales, bias)
