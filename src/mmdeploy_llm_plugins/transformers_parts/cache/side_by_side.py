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
from transformers.cache_utils import Cache, DummyLayer, DynamicLayer, LinearAttentionLayer

from mmdeploy_llm.forward import SequenceAttention

from .pages import Kept, PagedLayer, Places, sequence_cache
from .states import StateLayer


def can_hold(kept: Sequence[Kept]) -> bool:
    """Whether layers keep nothing but keys, values and states. What others keep counts tokens from
    the first of a sequence."""
    return not any(own.has_indexer or own.compress_rate for own in kept)


def cache_of(
    kept: list[Kept],
    places: Places,
    attn: SequenceAttention,
    sequences: Sequence[int],
    positions: Tensor,
) -> Cache:
    """Returns the cache of these sequences of the step. positions: of their tokens, one each, [B]
    or [axes, B]."""
    own = [
        sequence_cache(kept, places, attn, number, positions[..., index : index + 1]).layers
        for index, number in enumerate(sequences)
    ]
    made: list[Any] = []
    for one, layers in zip(kept, zip(*own, strict=True), strict=True):
        if one.has_keys:
            made.append(SideBySideStates(one, layers) if one.num_states else SideBySide(layers))
        else:
            made.append(StateLayer(one.num_states) if one.num_states else DummyLayer())
    return Cache(layers=made)


def mask_of(attn: SequenceAttention, sequences: Sequence[int], device: torch.device) -> Tensor:
    """Returns what transformers takes as attention_mask, [B, L]: 0 for padding, 1 for tokens."""
    lengths = torch.tensor([attn.sequences[number].num_cached for number in sequences])
    longest = int(lengths.max())
    is_token = torch.arange(longest + 1) >= longest - lengths.unsqueeze(1)
    return is_token.long().to(device)


class SideBySide(DynamicLayer):  # type: ignore[misc]
    """Holds one layer of the cache, for several sequences. layers: that of each."""

    def __init__(self, layers: Sequence[PagedLayer]) -> None:
        super().__init__()
        self._layers = layers
        self._longest = max(layers, key=lambda layer: layer.get_seq_length())
        self.is_sliding = self._longest.is_sliding
        self.sliding_window = self._longest.sliding_window

    def __deepcopy__(self, _: object) -> SideBySide:
        """Refuses: layers of a model with loops are copied for one sequence only."""
        raise TypeError("these layers are not copied")

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        """Stores [B, K, 1, D] and returns those of all tokens that the layer keeps."""
        count: int = self._longest.get_mask_sizes(key_states.shape[-2])[0]
        pairs = [
            layer.update(key_states[index : index + 1], value_states[index : index + 1])
            for index, layer in enumerate(self._layers)
        ]
        self.is_initialized = True
        self.keys, self.values = (
            torch.cat([F.pad(x, (0, 0, count - int(x.shape[-2]), 0)) for x in column])
            for column in zip(*pairs, strict=True)
        )
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Returns the tokens of the longest sequence so far."""
        return self._longest.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """See PagedLayer: those of the longest sequence."""
        return self._longest.get_mask_sizes(query_length)


class SideBySideStates(StateLayer, SideBySide):
    """A layer with attention and states."""

    def __init__(self, kept: Kept, layers: Sequence[PagedLayer]) -> None:
        SideBySide.__init__(self, layers)
        LinearAttentionLayer.__init__(self, kept.num_states)
