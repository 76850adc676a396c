"""The contract of attention backends. Nothing here imports torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from mmdeploy_llm.attention.base import BatchLayout, KVCache
    from mmdeploy_llm.forward import AttentionContext
    from mmdeploy_llm.kernels import Kernels

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
        "float32", "int8", "int4", "float8_e4m3fn"; see attention.base.KVCache.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSetup:
    """The engine for which a backend computes.

    dtype, kv_cache_dtype: as torch calls them. head_dims: sizes of the key and value heads, () if
    they are not known yet. block_size: tokens of a block, None before it is chosen.
    capability: compute capability of the card; None without one, or where it is not known.
    kernels: the compiled kernels of the engine; None without them.
    """

    device: torch.device
    dtype: str
    kv_cache_dtype: str
    head_dims: tuple[int, ...] = ()
    block_size: int | None = None
    capability: Capability | None = None
    kernels: Kernels | None = None


class AttentionBackend(ABC):
    """Computes attention for one engine. `begin` is called once per step, and `attend` of the
    context that it returns once per layer, by one thread at a time, under torch.inference_mode. An
    engine has its own instance, and under tensor parallelism each rank has one, for its heads.

    Shapes and the drawing of block tables, slots and CUDA graphs: attention.base. The rules:

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
    - `context.causal()` is the same step as if its media were text: see attention.base.

    name: as in its spec.
    can_capture: whether decode steps may be recorded in CUDA graphs; see attention.base.
    """

    name: str
    can_capture: bool = False

    @abstractmethod
    def begin(self, layout: BatchLayout, cache: KVCache) -> AttentionContext:
        """Returns the attention of one step, with everything computed that all layers share."""
