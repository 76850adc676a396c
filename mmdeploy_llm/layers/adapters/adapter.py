"""Adapter: what a folder of an adapter holds, checked, by the modules of its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import LoraConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """The change of one module: its weight [out, in] becomes weight + scale * b a.

    a: [r, in], or [E, r, in] of stacked experts. b: [out, r], or [E, out, r].
    bias: [out], which is added to the module's output; its scale is in it.
    magnitude: [out] of DoRA: the length that each row of the changed weight is given.
    """

    a: Tensor
    b: Tensor
    scale: float
    bias: Tensor | None = None
    magnitude: Tensor | None = None

    @property
    def rank(self) -> int:
        """The rank of the change."""
        return self.b.shape[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The content of an adapter's folder. A path is that of the module in the checkpoint, such as
    "model.layers.0.self_attn.q_proj"; of stacked experts that of their parameter.

    name: the folder, for messages. digest: of the bytes of its files.
    modules: low-rank changes, by path.
    embeddings: the same of embeddings: a [r, vocab], b [hidden, r].
    saved: tensors that take the place of the model's, by the checkpoint's key.
    tokens: rows of embeddings that take the place of the model's, by path.
    config: says which modules it is meant to change.
    """

    name: str
    digest: str
    modules: Mapping[str, LowRank]
    embeddings: Mapping[str, LowRank]
    saved: Mapping[str, Tensor]
    tokens: Mapping[str, TokenRows]
    config: LoraConfig

    @property
    def is_without_effect(self) -> bool:
        """Whether all that it adds is zero."""
        changes = (*self.modules.values(), *self.embeddings.values())
        others = (each for own in changes for each in (own.bias, own.magnitude) if each is not None)
        is_zero = not any(own.a.any() and own.b.any() for own in changes)
        return is_zero and not (self.saved or self.tokens or any(map(torch.any, others)))

    @property
    def max_rank(self) -> int:
        """The largest rank of its changes."""
        return max((x.rank for x in (*self.modules.values(), *self.embeddings.values())), default=0)

    @property
    def num_bytes(self) -> int:
        """The bytes of its tensors."""
        changes = [
            x
            for change in (*self.modules.values(), *self.embeddings.values())
            for x in (change.a, change.b, change.bias, change.magnitude)
            if x is not None
        ]
        rows = [x.rows for x in self.tokens.values()]
        return sum(x.nbytes for x in (*changes, *self.saved.values(), *rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRows:
    """Rows [N, hidden] of an embedding for the token ids [N] int64."""

    ids: Tensor
    rows: Tensor
