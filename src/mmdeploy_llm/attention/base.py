"""The interface of attention backends: store this step's keys and values in the paged KV cache, and
attend over it.

Shapes: T tokens of the step, B sequences, H query heads, K key/value heads, D head size,
N blocks, P tokens in a block (page), M blocks in the longest block table.

    block table of a sequence   [ 7 | 2 | 9 ]    tokens 0 .. P-1 in block 7, P .. 2P-1 in block 2
    slot of token i             block_table[i // P] * P + i % P

CUDA graphs. A backend with `can_capture` attends over decode tokens alone (one query token per
sequence, no spans) by reading nothing but the layout's tensors and the numbers that stay the same
in every replay: num_decode, and the bounds in `lengths`. `begin` and `attend` are both called while
the graph is captured; a replay launches the same kernels after the contents of the tensors were
changed in place. A layout made for capture (layouts.decode_layout) has empty host lists, so that a
backend that reads them fails at once and not in a replay.

A decode batch smaller than its graph is padded after its last sequence:

    slot -1             the row's key and value are not stored
    context length 1    with a block table of zeros: the output is finite, and discarded
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mmdeploy_llm.plugin_objects.attention import AttentionBackend

if TYPE_CHECKING:
    from torch import Tensor

    from mmdeploy_llm.forward import AttentionContext

__all__ = [
    "NO_SLOT",
    "AttentionBackend",
    "BatchLayout",
    "KVCache",
    "StepLengths",
    "without_spans",
]

NO_SLOT = -1  # the slot of a padding row


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    """The paged cache of all layers: keys[layer] and values[layer] are [N, P, K, D], zeroed once.
    K and D may differ between layers; a layer that shares another's cache has the same tensors, one
    that keeps a state has none of any size. Caches in int8 or 8-bit floats have a scale for each
    token and head, [N, P, K] float32. Those in 4 bits are [N, P, K, D / 2] uint8, with scales
    [N, P, K, groups, 2] bf16; see int4.py."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    key_scales: tuple[Tensor, ...] | None = None
    value_scales: tuple[Tensor, ...] | None = None

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return int(self.keys[0].shape[1])

    def scales(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """Returns the scales of a layer's keys and values; None if the cache has none."""
        if self.key_scales is None or self.value_scales is None:
            return None, None
        return self.key_scales[layer], self.value_scales[layer]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLengths:
    """The step's lengths, for kernels that read them on the device.

    query_starts: [B + 1] int32, the first row of each sequence, followed by T.
    context_lens: [B] int32, tokens of each sequence in the cache after this step.
    max_query, max_context: upper bounds of the lengths, which set launch sizes; in a captured step
        they hold for every replay.
    """

    query_starts: Tensor
    context_lens: Tensor
    max_query: int
    max_context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """Maps the step's tokens to sequences and cache slots. Sequences with one query token (decode)
    come first.

    num_decode: how many sequences have exactly one query token.
    query_lens: tokens of each sequence in this step, on the host.
    context_lens: tokens of each sequence in the cache after this step, on the host.
    block_tables: [B, M] int32 on the device, rows padded with 0.
    slots: [T] int64 on the device, where each token's key and value are stored.
    spans: (sequence, start, end): tokens start .. end of the sequence attend to each other in both
        directions; those that are not yet in the cache all belong to this step.
    lengths: the same lengths on a GPU; None on a CPU.
    is_padded: whether slots may have rows of NO_SLOT.
    windows: block tables and slots of the layers with a window, if a model has such layers; see
        windows.py. In their tables an entry without a token inside the window may be any block.
    """

    num_decode: int
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_tables: Tensor
    slots: Tensor
    spans: tuple[tuple[int, int, int], ...] = ()
    lengths: StepLengths | None = None
    is_padded: bool = False
    windows: tuple[Tensor, Tensor] | None = None


def without_spans(
    context: AttentionContext, backend: AttentionBackend, layout: BatchLayout, cache: KVCache
) -> AttentionContext:
    """Returns the attention of a step as if its media were text, perhaps `context` itself."""
    return backend.begin(replace(layout, spans=()), cache) if layout.spans else context
