"""What an attention backend is: it writes this step's keys and values to the paged KV cache and
attends over them.

Shapes: T tokens of the step, B sequences, H query heads, K key/value heads, D head size,
N blocks, P tokens in a block (page), M blocks in the longest block table.

    block table of a sequence   [ 7 | 2 | 9 ]          tokens 0..P-1 in block 7, P..2P-1 in
    block 2, ...
    slot of token i             block_table[i // P] * P + i % P
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from mmdeploy_llm.forward import AttentionContext


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    """The paged cache of all layers: keys[layer] and values[layer] are [N, P, K, D], zeroed
    once. In int8 each token and head has a scale, [N, P, K] float32."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    key_scales: tuple[Tensor, ...] | None = None
    value_scales: tuple[Tensor, ...] | None = None

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return int(self.keys[0].shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """Where the step's tokens belong. Sequences with one query token (decode) come first.

    num_decode: how many sequences have exactly one query token. query_lens: tokens of each sequence
    in this step. context_lens: tokens of each sequence in the cache after this step. block_tables:
    [B, M] int32, rows padded with 0. slots: [T] int64, where each token's key and value go.
    spans: (sequence, start, end): tokens start..end of the sequence see each other in both
    directions; all of them that are not yet in the cache belong to this step. Lists are for the
    host, tensors lie on the device.
    """

    num_decode: int
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_tables: Tensor
    slots: Tensor
    spans: tuple[tuple[int, int, int], ...] = ()


class AttentionBackend(Protocol):
    """Made once per engine; `begin` is called once per step, its context once per layer."""

    name: str

    def begin(self, layout: BatchLayout, cache: KVCache) -> AttentionContext:
        """The attention of one step; what all layers share is computed here."""
        ...
