"""Linear layers without initialisation: their weights come from a checkpoint, and may then be
packed for the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.kernels import Kernels, PackedWeight, Quantization, plain
from mmdeploy_llm.kernels.coded import CodedWeight
from mmdeploy_llm.values.options.weight_formats import rounds_inputs

from .kernel_layer import KernelLayer


def empty_parameter(*shape: int) -> nn.Parameter:
    """Returns a parameter without values, which a checkpoint will fill."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)


def emptied(weight: Tensor) -> nn.Parameter:
    """Returns the placeholder of a packed weight [..., n, k]: an empty tensor [..., 0, k] of the
    same dtype and device."""
    *outer, _, k = weight.shape
    return nn.Parameter(weight.new_empty(*outer, 0, k), requires_grad=False)


def check_finite(path: str, module: nn.Module) -> None:
    """Raises CheckpointError for a module with matrices that are to be rounded, where one has
    values that are not finite: a range has no room for infinity, and the search for it passes over
    NaN."""
    for name, param in module.named_parameters(recurse=False):
        values = param.detach()
        is_matrix = values.dim() > 1 and values.numel()
        if is_matrix and not torch.stack(torch.aminmax(values)).isfinite().all():
            raise CheckpointError(
                f"{path}.{name} has values that are not finite, which cannot be rounded: repair "
                "the checkpoint, or load it without quantization"
            )


class Adapted(Protocol):
    """Holds what adapters change of one matrix, or of a stack of experts."""

    @property
    def is_active(self) -> bool:
        """Whether an adapter of this pass changes it."""

    @property
    def changed(self) -> Any:
        """Returns the product of one matrix as the adapters change it."""

    def of_rows(self, rows: slice | Tensor) -> AbstractContextManager[None]:
        """Says that products have these rows of the pass, in this order, within the context."""


def of_rows(rows: slice | Tensor, *modules: Any) -> AbstractContextManager[None]:
    """Tells the adapters that change any of the modules that these have some rows of the pass."""
    own = (getattr(module, "adapted", None) for module in modules)
    adapted: Adapted | None = next((each for each in own if each is not None), None)
    return nullcontext() if adapted is None else adapted.of_rows(rows)


class Matrix(nn.Module):
    """A weight [n, k] to multiply by; k may be several axes. Once it is packed, `weight` is empty:
    [0, k], of the same dtype.

    is_exact: whether the weight is never rounded.
    out_dtype: of products, float32 for an output head, see `keep_sums`; None: that of x.
    """

    is_exact = False
    out_dtype: torch.dtype | None = None
    adapted: Adapted | None = None  # set while adapters change it

    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.weight = empty_parameter(n, k)
        self.packed: PackedWeight | None = None
        self._coded: CodedWeight | None = None

    @property
    def is_coded(self) -> bool:
        """Whether the weight is in few bits and waits to be packed."""
        return self._coded is not None

    def can_hold_coded(self, name: str) -> bool:
        """Whether `hold_coded` takes this parameter."""
        return name == "weight" and not self.is_exact

    def hold_coded(self, name: str, weight: CodedWeight) -> None:
        """Takes the weight in few bits, as its checkpoint stores it, until it is packed. The
        parameter `name` should be a placeholder by then."""
        assert self.can_hold_coded(name)
        self._coded = weight

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiplies x [..., k] -> [..., n]. Raises ValueError for another width."""
        out = self.own_product(x, bias)
        return out if self.adapted is None else self.adapted.changed(out, x, bias)

    def own_product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiplies as `product` does, without adapters."""
        if self.packed is None:
            return plain.linear(x, self.weight.flatten(1), bias, self.out_dtype)
        if x.shape[-1] != self.weight.shape[-1]:  # the kernels read as far as the weight reaches
            raise ValueError(f"rows of {x.shape[-1]} values times {tuple(self.weight.shape[1:])}")
        flat = x.reshape(-1, x.shape[-1])
        return self.packed.product(flat, bias, self.out_dtype).view(*x.shape[:-1], -1)

    def packed_parts(self) -> Mapping[str, PackedWeight]:
        """Returns the packed weight, if there is one, by a name."""
        return {} if self.packed is None else {"weight": self.packed}

    def take_packed(self, parts: Mapping[str, PackedWeight]) -> None:
        """Takes what `packed_parts` of an equal layer returned."""
        self.packed = parts["weight"]

    def pack(self, kernels: Kernels, quantization: Quantization | None) -> None:
        """Lays the weight out for `kernels`, rounded if requested; leaves it unchanged if they
        cannot pack it, or it is packed already. A weight that is in few bits already stays as it
        is, and `quantization` says only whether x is rounded."""
        if self.packed is not None:
            return
        if self._coded is not None:
            self.packed = kernels.pack_coded(self._coded, rounds=rounds_inputs(quantization))
            self._coded = None
            return
        weight = self.weight.detach().flatten(1)
        self.packed = kernels.pack(weight, None if self.is_exact else quantization)
        if self.packed is not None:
            self.weight = emptied(weight)


class Linear(Matrix):
    """Multiplies x [..., in_size] -> [..., out_size]. weight: [out_size, in_size]. bias: [out_size]
    or None."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool = False) -> None:
        super().__init__(out_size, in_size)
        self.bias = empty_parameter(out_size) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Computes one matrix product, bias included."""
        return self.product(x, self.bias)


class Embedding(Matrix, KernelLayer):
    """Looks up a row of `weight` [vocab, hidden] per token; as the output head it multiplies.
    lookups: what adapters change of the rows; `adapted` is of the head."""

    lookups: Any = None

    def forward(self, token_ids: Tensor) -> Tensor:
        """Looks up embeddings, [T] -> [T, hidden]."""
        rows = self._looked_up(token_ids)
        return rows if self.lookups is None else self.lookups.changed(rows, token_ids)

    def _looked_up(self, token_ids: Tensor) -> Tensor:
        if self.packed is not None:
            return self.packed.rows(token_ids, self.weight.dtype)
        return self.kernels.look_up(self.weight, token_ids)


def keep_sums(head: Matrix) -> None:
    """Has an output head return its sums in float32, unrounded. In bfloat16 the two largest of the
    logits are equal in one of twenty tokens of a small model, and the order of the vocabulary
    chose between them."""
    head.out_dtype = torch.float32


class MergedLinear(Linear):
    """Several linear layers of the same input, fused: their outputs are concatenated.

    parts: the checkpoint's name of each layer -> its rows of `weight` and `bias`; read by
        weights.map.
    """

    def __init__(self, in_size: int, part_sizes: Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__(in_size, sum(part_sizes.values()), bias=bias)
        ends = accumulate(part_sizes.values())
        self.parts = {
            name: slice(end - size, end)
            for (name, size), end in zip(part_sizes.items(), ends, strict=True)
        }
