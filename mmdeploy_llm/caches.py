"""LayerCache: the things that a layer of a model keeps of a sequence between steps.

    PagedKV     keys and values of every token, in blocks
    SharedKV    nothing: the layer reads the keys and values of another layer
    State       tensors of a fixed size, however long the sequence is

CrossKV is what layers read of an encoder's item: keys and values that are computed once.

A model without an attribute `cache` keeps the same PagedKV in all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKV:
    """Keys and values of every token.

    value_dim: channels of a value head; None: head_dim.
    window: a token attends to this many last tokens, itself included, so that blocks with older
        ones only are given back; None: to all tokens. Every call of attend then has such a window,
        or a shorter one.
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedKV:
    """The keys and values of an earlier layer, which has a PagedKV; this one stores none."""

    layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Tensors of a fixed size per sequence, such as a recurrent state or the tail of a convolution.

    shapes: of one sequence, on one device.
    dtypes: one per shape; "model" for the model's own dtype.
    is_replicated: whether tensor parallelism keeps all of it on every rank, and does not divide the
        first axis.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    is_replicated: bool = False

    def __post_init__(self) -> None:
        assert len(self.shapes) == len(self.dtypes), "a dtype for each shape"


LayerCache = PagedKV | SharedKV | State


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossKV:
    """Keys and values that an encoder writes once for each of its items, and that every token of
    the requests with that item attends to. They are kept in the encoder cache, counted by its
    tokens, while a running request has the item, and for the next ones while there is room.

    num_layers: layers of the decoder with cross attention, each with heads of its own.
    longest: tokens of the longest item; None: unknown. The cache then has its usual size.
    has_row_each: an item has a row for each of its tokens; False: as many as the model writes, and
        the tokens are what the cache counts.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    longest: int | None = None
    has_row_each: bool = True

    def shape(self, num_tokens: int) -> tuple[int, ...]:
        """Returns the shape of an item of this many tokens: keys, then values, of each layer."""
        return self.num_layers, 2, num_tokens, self.num_kv_heads, self.head_dim

    @property
    def token_size(self) -> int:
        """Values of one token of the encoder."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def head_dims(model: Any) -> tuple[int, ...]:
    """Returns the different sizes of the key and value heads of a Model, in channels, ascending."""
    paged = [layer for layer in layer_caches(model) if isinstance(layer, PagedKV)]
    sizes = {layer.head_dim for layer in paged}
    return tuple(sorted(sizes.union(x.value_dim for x in paged if x.value_dim is not None)))


def layer_windows(layers: Sequence[LayerCache]) -> dict[int, int]:
    """Returns the window of each layer whose keys and values have one, by its index."""
    found: dict[int, int] = {}
    for index, layer in enumerate(layers):
        kept = layers[layer.layer] if isinstance(layer, SharedKV) else layer
        if isinstance(kept, PagedKV) and kept.window is not None:
            found[index] = kept.window
    return found


def longest_window(model: Any) -> int | None:
    """Returns the longest window of the layers of a Model, in tokens; None without any."""
    return max(layer_windows(layer_caches(model)).values(), default=None)


def divided(layer: LayerCache, num_ranks: int) -> LayerCache:
    """Returns what one of num_ranks ranks keeps of a layer under tensor parallelism: its heads."""
    if isinstance(layer, PagedKV):
        return replace(layer, num_kv_heads=max(1, layer.num_kv_heads // num_ranks))
    if isinstance(layer, State) and not layer.is_replicated:
        shapes = tuple((shape[0] // num_ranks, *shape[1:]) for shape in layer.shapes)
        return replace(layer, shapes=shapes)
    return layer


def layer_caches(model: Any) -> tuple[LayerCache, ...]:
    """Returns what each layer of a Model keeps: its `cache`, or PagedKV of one size for all."""
    caches = getattr(model, "cache", None)
    if caches is not None:
        return tuple(caches)
    uniform = PagedKV(num_kv_heads=model.num_kv_heads, head_dim=model.head_dim)
    return (uniform,) * int(model.num_layers)
