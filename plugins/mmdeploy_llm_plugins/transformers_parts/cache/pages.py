"""transformers' cache of one sequence, with its keys and values in the pages of the engine.

    layer of the model --> Cache.update(k, v) --> SequenceAttention.extend --> keys, values so far

Shapes: n tokens of the sequence in this step, L tokens so far, K key/value heads, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from mmdeploy_llm.forward import SequenceAttention, SequenceRows

from .states import StateLayer

REFERENCE = "reference_sliding_attention"  # sees all of the prompt, and a window after it
# Sees entries too, each made of as many tokens as `compress_rates` says.
COMPRESSED = ("heavily_compressed_attention", "compressed_sparse_attention")
NUM_BITS = 24  # of a position
WITH_WINDOW = (DynamicSlidingWindowLayer, LinearAttentionAndSlidingWindowAttentionLayer)
WITH_STATES = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Says what transformers keeps in a layer.

    has_keys: whether the layer has keys and values of its own; else it reads those of another, or
    none. window: it keeps those of the last window - 1 tokens; None: of all tokens. has_indexer:
    whether it keeps the keys of an indexer too. compress_rate: tokens of a compressed entry; 0
    without these. num_states: how many convolutions and recurrences
    keep a state.
    """

    has_keys: bool = True
    window: int | None = None
    has_indexer: bool = False
    compress_rate: int = 0
    num_states: int = 0


@dataclass(slots=True)
class Places:
    """Says in which layer of the engine's cache a thing is kept. `of` is the only writer: it adds a
    place when a trial first asks for it.

    index: (layer of the model, what is kept) -> layer of the engine's cache. width: channels of a
    row there, the most that any layer needs.
    """

    index: dict[tuple[int, str], int] = field(default_factory=dict)
    width: int = 1

    def of(self, layer: int, what: str, *rows: Tensor) -> int:
        """Returns the engine's layer, which must hold `rows` [n, channels]."""
        place = self.index.setdefault((layer, what), len(self.index))
        self.width = max(self.width, *(row.shape[1] for row in rows))
        return place


def kept_by_layers(config: Any) -> list[Kept]:
    """Returns what transformers' own cache keeps in each layer. Raises ValueError for a layer that
    keeps anything but rows per token and states of a fixed size, and what transformers' code
    raises."""
    found = []
    for number, layer in enumerate(DynamicCache(config=config).layers):
        kind, name = type(layer), getattr(layer, "_layer_type", "")
        if name == REFERENCE:  # keeps all, and masks say what it sees
            kind = DynamicLayer
        elif name in COMPRESSED:
            kind = DynamicSlidingWindowLayer
        if kind not in (*WITH_WINDOW, *WITH_STATES, DynamicLayer, DynamicIndexedLayer, DummyLayer):
            raise ValueError(f"layer {number} has a {kind.__name__}")
        found.append(
            Kept(
                has_keys=kind not in (DummyLayer, LinearAttentionLayer),
                window=int(layer.sliding_window) if kind in WITH_WINDOW else None,
                has_indexer=kind is DynamicIndexedLayer,
                compress_rate=layer.compress_rate if name in COMPRESSED else 0,
                num_states=layer.number_of_states if kind in WITH_STATES else 0,
            )
        )
    return found


def sequence_cache(
    kept: list[Kept], places: Places, attn: SequenceAttention, sequence: int, positions: Tensor
) -> Cache:
    """Returns the cache of one sequence of the step. positions: of its new tokens, [n] or
    [axes, n]."""
    layers: list[Any] = []
    copies = itertools.count(len(kept))
    for number, own in enumerate(kept):
        if own.has_keys:
            layer = _layer_class(own)(own, places, attn, sequence, number, copies)
            layer.new_positions = positions
            layers.append(layer)
        else:
            layers.append(StateLayer(own.num_states) if own.num_states else DummyLayer())
    return Cache(layers=layers)


class PagedLayer(DynamicLayer):  # type: ignore[misc]
    """Holds one layer of transformers' cache, for one sequence in one step."""

    def __init__(
        self,
        kept: Kept,
        places: Places,
        attn: SequenceAttention,
        sequence: int,
        layer: int,
        copies: Iterator[int],
    ) -> None:
        """copies: numbers of the layers that a model with loops adds to the cache as copies."""
        super().__init__()
        self.new_positions = torch.empty(0)  # of the step's tokens; sequence_cache sets them
        self._copies = copies
        self._kept = kept
        self._places = places
        self._attn = attn
        self._sequence = sequence
        self._layer = layer
        self._length = attn.sequences[sequence].num_cached
        self.is_sliding = kept.window is not None
        self.sliding_window = kept.window

    def __deepcopy__(self, _: object) -> PagedLayer:
        """Returns a layer of its own place, which holds nothing yet in this step."""
        given = self._kept, self._places, self._attn, self._sequence
        return type(self)(*given, next(self._copies), self._copies)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        """Stores [1, K, n, D] and returns those of all tokens that the layer keeps."""
        window = self._kept.window
        keys, values = self.extend(
            "attention", _rows(key_states), _rows(value_states), window and window - 1
        )
        self._length += key_states.shape[-2]
        self.is_initialized = True
        self.keys, self.values = _heads(keys, key_states), _heads(values, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Returns the tokens of the sequence so far."""
        return int(self._length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns how many keys `update` will return when it is given that many tokens, and the
        position of the first key."""
        window = self._kept.window
        first = 0 if window is None else max(0, self._length - window + 1)
        return self._length - first + query_length, first

    def extend(
        self, what: str, k: Tensor, v: Tensor, num_kept: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Stores a row of `what` for each new token, and returns those of all tokens, or of the
        last num_kept and the new ones."""
        place, width = self._places.of(self._layer, what, k, v), self._places.width
        padded_k, padded_v = (F.pad(x, (0, width - x.shape[1])).unsqueeze(1) for x in (k, v))
        keys, values = self._attn.extend(self._sequence, place, padded_k, padded_v, num_kept)
        return keys[:, 0, : k.shape[1]], values[:, 0, : v.shape[1]]


class IndexedLayer(PagedLayer):
    """A layer with the keys of an indexer, which chooses the tokens that are attended to, and for
    models that ask for them the positions of all tokens."""

    _earlier: Tensor | None = None
    _has_earlier = False

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """The positions [3, 1, cached] of the tokens before this step, None at the beginning. The
        first model that asks has those of the step stored too, each bit as a channel, since pages
        keep 0 and 1 exactly in any dtype."""
        if not self._has_earlier:
            self._has_earlier = True
            rows = _bits(self.new_positions)
            found, _ = self.extend("positions", rows, rows[:, :0])
            count = found.shape[0] - rows.shape[0]
            self._earlier = _numbers(found[:count]) if count else None
        return self._earlier

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor) -> None:
        """Ignores the positions of all tokens, which are stored already."""

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Stores [1, n, D] and returns those of all tokens, [1, L, D]."""
        rows = indexer_key_states[0]
        keys, _ = self.extend("indexer", rows, rows[:, :0])
        return keys.unsqueeze(0)


class CompressedLayer(PagedLayer):
    """A layer that attends to compressed entries of earlier tokens besides those of its window
    (DeepSeek V4). The pages keep what entries are made of, and each step makes all of them anew,
    so they do not depend on the steps in which their tokens came."""

    def store_compression_weights(
        self, name: str, kv: Tensor, gate: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        """Stores [1, n, D] of each and returns those of all whole entries, and the first's
        position."""
        kvs, gates = self.extend(name, kv[0], gate[0])
        end = kvs.shape[0] // self._kept.compress_rate * self._kept.compress_rate
        return kvs[None, :end], gates[None, :end], 0

    def update_overlap_state(self, *_: Any) -> tuple[None, None]:
        """Returns what is before the first entry: nothing."""
        return None, None

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """Returns all entries, which are those given."""
        return compressed


class PagedStateLayer(StateLayer, PagedLayer):
    """A layer with attention and states."""

    def __init__(self, kept: Kept, *args: Any) -> None:
        PagedLayer.__init__(self, kept, *args)
        LinearAttentionLayer.__init__(self, kept.num_states)


class OneByOne:
    """Shows the tokens of one sequence in a step one at a time; see forward.SequenceAttention.

    `has_next` moves on to the next token. The rows of later tokens are zero until they come.
    """

    def __init__(self, attn: SequenceAttention, sequence: int) -> None:
        self.sequences: tuple[SequenceRows, ...] = ()
        self._attn = attn
        self._sequence = sequence
        self._rows = attn.sequences[sequence]
        self._num_done = 0
        self._new: dict[int, tuple[Tensor, Tensor]] = {}  # by layer

    def has_next(self) -> bool:
        """Makes the next token the only one of `sequences`; returns False after the last."""
        row = self._rows.start + self._num_done
        if row == self._rows.end:
            return False
        length = self._rows.num_cached + self._num_done
        self.sequences = (SequenceRows(start=row, end=row + 1, num_cached=length),)
        self._num_done += 1
        return True

    def extend(
        self, sequence: int, layer: int, k: Tensor, v: Tensor, num_kept: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """See forward.SequenceAttention."""
        if layer not in self._new:
            count = self._rows.end - self._rows.start
            self._new[layer] = (
                k.new_zeros(count, *k.shape[1:]),
                v.new_zeros(count, *v.shape[1:]),
            )
        rows = self._new[layer]
        for all_rows, new in zip(rows, (k, v), strict=True):
            all_rows[self._num_done - 1] = new[0]
        keys, values = self._attn.extend(self._sequence, layer, *rows)
        cached = self.sequences[0].num_cached
        first = 0 if num_kept is None else max(0, cached - num_kept)
        return keys[first : cached + 1], values[first : cached + 1]


def _bits(positions: Tensor) -> Tensor:
    """[n] or [axes, n] -> [n, axes * NUM_BITS] of zeros and ones; one axis stands for three."""
    axes = positions if positions.ndim == 2 else positions.expand(3, -1)
    places = torch.arange(NUM_BITS, device=positions.device)
    return (axes.T.unsqueeze(-1) >> places & 1).flatten(1).float()


def _numbers(rows: Tensor) -> Tensor:
    """[n, axes * NUM_BITS] -> [axes, 1, n], the inverse of _bits."""
    places = torch.arange(NUM_BITS, device=rows.device)
    bits = rows.round().long().view(rows.shape[0], -1, NUM_BITS)
    numbers: Tensor = (bits << places).sum(-1)
    return numbers.T.unsqueeze(1)


def _layer_class(kept: Kept) -> type[PagedLayer]:
    if kept.num_states:
        return PagedStateLayer
    if kept.compress_rate:
        return CompressedLayer
    return IndexedLayer if kept.has_indexer else PagedLayer


def _rows(x: Tensor) -> Tensor:
    """[1, K, n, D] -> [n, K * D]."""
    return x[0].transpose(0, 1).flatten(1)


def _heads(rows: Tensor, like: Tensor) -> Tensor:
    """[L, K * D] -> [1, K, L, D], with K and D of `like` [1, K, n, D]."""
    heads = rows.reshape(rows.shape[0], like.shape[1], like.shape[3])
    return heads.transpose(0, 1).unsqueeze(0)
