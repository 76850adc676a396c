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

Nothing here imports torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mmdeploy_llm.forward import Alibi, AttentionContext

Capability = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBackendSpec:
    """A backend of attention over the paged KV cache, and what it can compute. What a spec does not
    declare is never asked of its backend: the engine chooses another one, or says why it cannot.

    name, aliases: what the option `attention_backend` calls it.
    factory: "module:Class", called as factory(setup) with an AttentionSetup; returns an
        AttentionBackend. It is called before the weights are read, so that what is missing is told
        early, and again for each KV cache, twice for a model in which some layers have a window.
    devices: types of torch devices, such as "cpu" and "cuda".
    dtypes: of queries, keys, values and results, as torch calls them.
    cache_dtypes: dtypes of the KV cache besides that of the queries: "bfloat16", "float16",
        "float32", "int8", "int4", "float8_e4m3fn"; see KVCache.
    max_head_dim, head_multiple: head sizes are multiples of the second up to the first; None: any.
    block_multiple: block sizes of the cache are multiples of this. block_size: the default.
    min_capability, below_capability: the lowest compute capability of a card, and the first that is
        too new; None: no bound.
    windows, softcaps, sinks, alibi: whether `attend` takes these options.
    media_spans: whether tokens of a media item may attend to each other in both directions.
    sequences: whether its contexts are a forward.SequenceAttention too.
    deterministic: whether a row of its results is the same bits whatever else is in the batch.
    available: "module:function", called as function(setup) before the factory is; returns None, or
        why the backend cannot be used here, as the end of a sentence: "needs the library x; ...".
        It is asked on machines without the library, so it imports nothing heavy.
    priority: with `attention_backend="auto"` the highest that can serve the model computes. Those
        that come with this package have 60 to 10, and plain torch 0, after which an installed
        backend with 0 comes first.
    """

    name: str
    factory: str
    devices: tuple[str, ...] = ("cpu",)
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    cache_dtypes: tuple[str, ...] = ()
    max_head_dim: int | None = None
    head_multiple: int = 1
    block_multiple: int = 1
    block_size: int = 64
    min_capability: Capability | None = None
    below_capability: Capability | None = None
    windows: bool = False
    softcaps: bool = False
    sinks: bool = False
    alibi: bool = False
    media_spans: bool = False
    sequences: bool = False
    deterministic: bool = False
    available: str | None = None
    aliases: tuple[str, ...] = ()
    priority: int = 0


NO_SLOT = -1  # the slot of a padding row


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    """The paged cache of all layers: keys[layer] and values[layer] are [N, P, K, D], zeroed once.
    K and D may differ between layers; a layer that shares another's cache has the same tensors, one
    that keeps a state has none of any size. Caches in int8 or 8-bit floats have a scale for each
    token and head, [N, P, K] float32. Those in 4 bits are [N, P, K, D / 2] uint8, with scales
    [N, P, K, groups, 2] bf16; see
    layers/attention/int4.py."""

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
        layers/attention/windows.py. In their tables an entry without a token inside the window may
        be any block.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleKeys:
    """The keys that the query tokens of an attention call attend to: for each token, a range of its
    sequence's keys.

    query_starts: [B + 1] int64, the first query row of each sequence, followed by T.
    first_visible, end_visible: [T] int64, the first visible key and the end of the range.
    block_tables: [B, M] int32 of a paged cache; None when the keys are [T, K, D], one for each
        query row.
    """

    query_starts: Tensor
    first_visible: Tensor
    end_visible: Tensor
    block_tables: Tensor | None = None


class AttentionKernels(Protocol):
    """Computes attention on the host, over a paged cache or over segments of tokens."""

    def can_attend(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether `attend` computes on [T, heads, D] like these."""

    def write_cache(
        self, rows: Tensor, cache: Tensor, slots: Tensor, scales: Tensor | None = None
    ) -> None:
        """Writes `rows` [T, K, D] to their slots [T] int64 of `cache` [N, P, K, D]: of the same
        dtype, or with `scales` as KVCache has them."""

    def attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        visible: VisibleKeys,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        alibi: Alibi | None = None,
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
    ) -> Tensor:
        """Returns attention of `q` [T, H, D] as [T, H, D]. keys, values: pages [N, P, K, D] of the
        same dtype (or with scales, as KVCache has them), or [T, K, D]. softcap,
        sinks, alibi: see forward.AttentionContext. The biases' dtype is None or bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSetup:
    """The engine for which a backend computes.

    dtype, kv_cache_dtype: as torch calls them. head_dims: sizes of the key and value heads, () if
    they are not known yet. block_size: tokens of a block, None before it is chosen.
    capability: compute capability of the card; None without one, or where it is not known.
    kernels: the compiled attention of the engine; None without it.
    """

    device: torch.device
    dtype: str
    kv_cache_dtype: str
    head_dims: tuple[int, ...] = ()
    block_size: int | None = None
    capability: Capability | None = None
    kernels: AttentionKernels | None = None


class AttentionBackend(ABC):
    """Computes attention for one engine. `begin` is called once per step, and `attend` of the
    context that it returns once per layer, by one thread at a time, under torch.inference_mode. An
    engine has its own instance, and under tensor parallelism each rank has one, for its heads.

    Shapes and the drawing of block tables, slots and CUDA graphs are above. The rules:

    - `attend(layer, q, k, v, ...)` stores k, v [T, K, D] in cache.keys[layer], cache.values[layer]
      at layout.slots, in place and in the cache's dtype, and then returns attention of q [T, H, D]
      as a new [T, H, value's D] in the dtype of q. Without k and v another layer has stored them.
      q, k and v may be views whose tokens and heads lie apart; only their last axis is dense.
    - Query head h reads key head h // (H / K). Row t of sequence b is its token context_lens[b] -
      query_lens[b] + t and sees the tokens up to itself, the last `window` of them, and in a layout
      with spans all of its own span, whatever the window.
    - Every other block, and each row past a sequence's end in its last block, may hold anything,
      also NaN: it belongs to others. The last columns of a table are padding or blocks for later.
    - The result does not depend on how a sequence was divided into steps, apart from rounding.
    - An option that the spec does not declare raises ModelNotSupportedError and is never ignored.
      A model's options are the same in all steps, so that this ends the start and no batch.
    - What all layers share is computed in `begin`, not for each layer.
    - `context.causal()` is the same step as if its media were text: see without_spans.

    name: as in its spec.
    can_capture: whether decode steps may be recorded in CUDA graphs; see above.
    """

    name: str
    can_capture: bool = False

    @abstractmethod
    def begin(self, layout: BatchLayout, cache: KVCache) -> AttentionContext:
        """Returns the attention of one step, with everything computed that all layers share."""


def without_spans(
    context: AttentionContext, backend: AttentionBackend, layout: BatchLayout, cache: KVCache
) -> AttentionContext:
    """Returns the attention of a step as if its media were text, perhaps `context` itself."""
    return backend.begin(replace(layout, spans=()), cache) if layout.spans else context
