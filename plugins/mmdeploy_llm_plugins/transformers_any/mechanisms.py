"""Names what serves a model, for people: the census lists it for each class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mmdeploy_llm.caches import LayerCache, PagedKV, SharedKV, State
from mmdeploy_llm_plugins.transformers_parts.cache.pages import Kept

from . import ATOMIC, masks, media
from .wrapped import Parts

TOGETHER, ONE_AFTER_THE_OTHER = "attention of the engine", "by sequence"  # the first of each model
RECOMPUTED = "all of a sequence at each step"
REPEATED = "all of `generate` at each step"
# How sequences that get one token each are computed where the rest is by sequence; see the log.
SHARED, ALONE = "one pass for decoding", "a pass for each sequence"
CHUNKED = "chunked_attention"  # in a config's layer_types


def of_caches(model: Any, layers: Sequence[LayerCache]) -> Iterator[str]:
    """Yields what the cache of any Model shows."""
    if getattr(model, "cross", None) is not None:
        yield "cross attention"
    if any(isinstance(layer, PagedKV) and layer.window for layer in layers):
        yield "windows"
    if any(isinstance(layer, SharedKV) for layer in layers):
        yield "keys of another layer"
    if any(isinstance(layer, State) for layer in layers):
        yield "recurrent states"
    if getattr(model, "has_sinks", False):
        yield "sinks"


def of_parts(parts: Parts) -> Iterator[str]:
    """Yields what a decoder of transformers is given besides embeddings and positions."""
    if parts.name in (*ATOMIC, *masks.MARKERS):
        yield "media masks"
    if parts.name in masks.REFERENCES:
        yield "reference windows"
    if parts.makers:
        yield "per-layer inputs"
    if media.feature_layers(parts.inner.config):
        yield "features of media in layers"
    if parts.num_axes:
        yield "M-RoPE"


def of_kept(config: Any, kept: Sequence[Kept], num_copies: int) -> Iterator[str]:
    """Yields what transformers' own attention keeps. config: of the decoder. num_copies: places of
    keys that a model with loops adds to its layers."""
    is_chunked = CHUNKED in (getattr(config, "layer_types", None) or ())
    if is_chunked:
        yield "chunked attention"
    if any(own.window for own in kept) and not is_chunked:
        yield "windows"
    if any(not own.has_keys and not own.num_states for own in kept):
        yield "keys of another layer"
    if any(own.has_indexer for own in kept):
        yield "chosen keys"
    if any(own.compress_rate for own in kept):
        yield "compressed attention"
    if num_copies:
        yield "layers in loops"
