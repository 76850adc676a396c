"""Mixtures of experts: which experts a token has, and the experts of a small step in one call."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from ctypes import Structure, addressof
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from mmdeploy_llm.kernels.base import PackedWeight
from mmdeploy_llm.kernels.low_rank import ExpertChanges, LowRankTable
from mmdeploy_llm.kernels.mixtures import Gates, RouteRule, Scores
from mmdeploy_llm.kernels.plain import ActivationName

from .library import FLOATS, Library
from .low_rank import Table
from .packed import PACKED

PRODUCTS = ("linear", "linear_s8", "linear_codes")  # as experts.h numbers them
Matrix = tuple[str, Structure]  # the name of a product and its arguments


class Mixtures(Library):
    """Chooses and runs experts with the C++ library."""

    def widen(self, x: Tensor) -> Tensor:
        if x.dtype is torch.float32:
            return x
        if not self.takes_whole(x):
            return super().widen(x)
        out = self._empty(x.shape, dtype=torch.float32)
        self._library.widen(x=x, out=out, values=x.numel())
        return out

    def choose(
        self,
        logits: Tensor,
        bias: Tensor | None,
        rule: RouteRule,
        dtype: torch.dtype,
        factors: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if dtype not in FLOATS or not self.takes_whole(logits):
            return super().choose(logits, bias, rule, dtype, factors)
        tokens, experts = logits.shape
        weights = self._empty((tokens, rule.top_k), dtype=dtype)
        ids = self._empty((tokens, rule.top_k), dtype=torch.int64)
        self._library.route(
            dtype=logits.dtype,
            out_dtype=dtype,
            logits=logits,
            bias=bias,
            factors=factors,
            weights=weights,
            ids=ids,
            tokens=tokens,
            experts=experts,
            top_k=rule.top_k,
            kind=get_args(Scores).index(rule.scores),
            groups=rule.num_groups,
            used_groups=rule.num_used,
            is_normed=rule.is_normed,
            norm_min=rule.norm_min,
            norm_more=rule.norm_more,
            factor=rule.factor,
            rounds=rule.rounds,
        )
        return weights, ids

    def mixture(
        self,
        pairs: Sequence[tuple[PackedWeight, PackedWeight]],
        sizes: tuple[int, int],
        dtype: torch.dtype,
        biases: Sequence[tuple[Tensor | None, Tensor | None]],
        *,
        is_in_file: bool = False,
    ) -> Mixture | None:
        if self.leaves_many_rows_to_torch:
            return None
        own = [
            self._matrix(weight, bias, k, dtype)
            for pair, added in zip(pairs, biases, strict=True)
            for weight, bias, k in zip(pair, added, sizes, strict=True)
        ]
        found = [matrix for matrix in own if matrix is not None]
        kinds = [{name for name, _ in found[at::2]} for at in range(2)]
        if len(found) < len(own) or any(len(kind) > 1 for kind in kinds):
            return None
        return Mixture(self, found, sizes, _pages_of(pairs) if is_in_file else None)

    def _matrix(
        self, weight: PackedWeight, bias: Tensor | None, k: int, dtype: torch.dtype
    ) -> Matrix | None:
        """Returns the product by `weight` [n, k]; None where it is no single call."""
        if type(weight).__name__ not in PACKED:  # one that is watched, say
            return None
        x = self._empty((1, k), dtype=dtype)
        found = self.captured(lambda: weight.product(x, bias))
        if len(found) != 1 or found[0][0] not in PRODUCTS or found[0][1].k != k:
            return None
        return found[0]


class Mixture:
    """The experts of one layer; see kernels.mixtures.Mixture."""

    def __init__(
        self,
        kernels: Mixtures,
        matrices: Sequence[Matrix],
        sizes: tuple[int, int],
        pages: Tensor | None,
    ) -> None:
        """matrices: gate and up together, then down, of each expert. sizes: of the hidden states,
        and of an expert. pages: see calls.h."""
        self._kernels, self._sizes, self._pages = kernels, sizes, pages
        self._kinds = [PRODUCTS.index(name) for name, _ in matrices[:2]]
        self._args = [args for _, args in matrices]  # kept alive
        own = np.array([addressof(args) for args in self._args], dtype=np.int64)
        self._table = torch.from_numpy(own)
        self._changing: Mapping[tuple[int, bool], LowRankTable] | None = None
        self._changes: Tensor | None = None
        self._change_args: list[Structure] = []

    def takes(self, changes: ExpertChanges) -> bool:
        return all(isinstance(table, Table) for table in changes.tables.values())

    def run(
        self,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
        gates: Gates,
        changes: ExpertChanges | None = None,
    ) -> Tensor:
        names: tuple[str, ...] = get_args(ActivationName)
        assert weights.is_contiguous()
        assert experts.is_contiguous()
        kernels, (size, inner) = self._kernels, self._sizes
        tokens, top_k = experts.shape
        both = 2 * inner if gates.has_gate else inner
        widths = {"rows": size, "both": both, "hidden": inner, "outs": size}
        kind = -1 if gates.activation == "clamped" else names.index(gates.activation)
        memory = {
            name: kernels._empty((tokens * top_k, width), dtype=x.dtype)
            for name, width in widths.items()
        }
        out = kernels._empty((tokens, size), dtype=x.dtype)
        kernels._library.run_experts(
            dtype=x.dtype,
            weights_dtype=weights.dtype,
            activation=kind if gates.has_gate else -2 - kind,
            alpha=gates.alpha,
            limit=gates.limit,
            x=x,
            x_stride=x.stride(0),
            weights=weights,
            ids=experts,
            matrices=self._table,
            pages=self._pages,
            slots=None if changes is None else changes.slots,
            changes=None if changes is None else self._changes_by(changes.tables),
            first_kind=self._kinds[0],
            last_kind=self._kinds[1],
            **memory,
            out=out,
            tokens=tokens,
            experts=len(self._args) // 2,
            top_k=top_k,
            size=size,
            inner=inner,
        )
        return out

    def _changes_by(self, tables: Mapping[tuple[int, bool], LowRankTable]) -> Tensor | None:
        """Returns the addresses of LowRank arguments, [E, 2]. They stay where they are for as long
        as the same matrices are changed."""
        if self._changing != tables:
            found = np.zeros((len(self._args) // 2, 2), dtype=np.int64)
            self._change_args = []
            for (expert, is_down), table in tables.items():
                assert isinstance(table, Table), "takes was True"
                self._change_args.append(table.arguments())
                found[expert, int(is_down)] = addressof(self._change_args[-1])
            self._changing, self._changes = dict(tables), torch.from_numpy(found)
        return self._changes


def _pages_of(pairs: Sequence[tuple[PackedWeight, PackedWeight]]) -> Tensor:
    """Returns address and bytes of the pages of each pair, which lie together in a file, [E, 2]."""
    found = []
    for pair in pairs:
        parts = [it for own in pair for it in vars(own).values() if isinstance(it, Tensor)]
        begin = min(part.data_ptr() for part in parts) // mmap.PAGESIZE * mmap.PAGESIZE
        found.append((begin, max(part.data_ptr() + part.nbytes for part in parts) - begin))
    return torch.tensor(found)
