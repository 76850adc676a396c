"""transformers' cache of several sequences that get one token each, in one pass of the model as in
its own `generate`: the shorter ones begin with padding, which a mask hides.

    keys of sequence 0    .  .  .  k0 k1 | k2     the last is the step's token
    keys of sequence 1    k0 k1 k2 k3 k4 | k5
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, DummyLayer, LinearAttentionLayer

from mmdeploy_llm.forward import SideBySideAttention

from .pages import Kept, PagedLayer, Places
from .states import StateLayer


def can_hold(kept: Sequence[Kept]) -> bool:
    """Whether layers keep nothing but keys, values and states. What others keep counts tokens from
    the first of a sequence."""
    return not any(own.has_indexer or own.compress_rate for own in kept)


def cache_of(
    kept: list[Kept], places: Places, attn: SideBySideAttention, sequences: Sequence[int]
) -> Cache:
    """Returns the cache of these sequences of the step, which get one token each."""
    made: list[Any] = []
    for number, own in enumerate(kept):
        if own.has_keys:
            kind = SideBySideStates if own.num_states else SideBySide
            made.append(kind(own, places, attn, sequences, number))
        else:
            made.append(StateLayer(own.num_states) if own.num_states else DummyLayer())
    return Cache(layers=made)


def mask_of(attn: SideBySideAttention, sequences: Sequence[int], device: torch.device) -> Tensor:
    """Returns what transformers takes as attention_mask, [B, L]: 0 for padding, 1 for tokens."""
    lengths = torch.tensor([attn.sequences[number].num_cached for number in sequences])
    longest = int(lengths.max())
    is_token = torch.arange(longest + 1) >= longest - lengths.unsqueeze(1)
    return is_token.long().to(device)


class SideBySide(PagedLayer):
    """Holds one layer of the cache, for several sequences. It counts as the longest one's."""

    def __init__(
        self,
        kept: Kept,
        places: Places,
        attn: SideBySideAttention,
        sequences: Sequence[int],
        layer: int,
    ) -> None:
        longest = max(sequences, key=lambda number: attn.sequences[number].num_cached)
        super().__init__(kept, places, attn, longest, layer, iter(()))
        self._all = attn
        self._sequences = sequences

    def __deepcopy__(self, _: object) -> SideBySide:
        """Refuses: layers of a model with loops are copied for one sequence only."""
        raise TypeError("these layers are not copied")

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        """Stores [B, K, 1, D] and returns those of all tokens that the layer keeps."""
        window, rows = self._kept.window, [x.flatten(1) for x in (key_states, value_states)]
        place, width = self._places.of(self._layer, "attention", *rows), self._places.width
        k, v = (F.pad(x, (0, width - x.shape[1])).unsqueeze(1) for x in rows)
        found = self._all.extend_each(self._sequences, place, k, v, window and window - 1)
        self._length += 1
        self.is_initialized = True
        self.keys, self.values = (
            kept[:, :, 0, : own.shape[1]]
            .reshape(*kept.shape[:2], like.shape[1], like.shape[3])
            .transpose(1, 2)
            for kept, own, like in zip(found, rows, (key_states, value_states), strict=True)
        )
        return self.keys, self.values


class SideBySideStates(StateLayer, SideBySide):
    """A layer with attention and states."""

    def __init__(self, kept: Kept, *given: Any) -> None:
        SideBySide.__init__(self, kept, *given)
        LinearAttentionLayer.__init__(self, kept.num_states)
