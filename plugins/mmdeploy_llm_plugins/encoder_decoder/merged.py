"""Attention of a step's tokens to their sequences and, in the same softmax, to an encoder's items.

    sequences that get one token    keys side by side, shorter ones padded in front: one call
    others                          a call each

Shapes: T tokens, n of one sequence, B sequences, L keys, H heads, K key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mmdeploy_llm.forward import (
    CrossContext,
    SequenceAttention,
    SequenceRows,
    SideBySideAttention,
)

Bias = Callable[[Tensor], Tensor]  # distances from a token back to its keys, [n, L] -> [H, n, L]
MAX_PADDING = 1.5  # times: how many keys a call may read of those that it needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Sequences of a step that share a call, and their rows."""

    sequences: tuple[int, ...]
    rows: Tensor


class StepAttention:
    """Computes the attention of one step, whose layers share its calls and masks.

    attn: of a model that has attends_itself. cross: of items that all tokens of a sequence see;
    None: of none. bias: is added to the scaled scores.
    """

    def __init__(
        self, attn: object, cross: CrossContext | None = None, bias: Bias | None = None
    ) -> None:
        assert isinstance(attn, SequenceAttention), "the model has attends_itself"
        self._attn, self._cross, self._bias = attn, cross, bias
        self._calls = [*self._divided()]
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        window: int | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Stores `k`, `v` [T, K, D] and returns attention of `q` [T, H, D] as [T, H, D]. window: a
        token sees this many last ones, itself included; None: all."""
        out = torch.empty_like(q)
        for number, call in enumerate(self._calls):
            keys, values = self._extended(call, layer, k[call.rows], v[call.rows], window)
            mask = self._mask(number, keys.shape[1], window, q.dtype)
            item = self._item(call, layer)
            if item is not None:
                keys, values = torch.cat([keys, item[0]], 1), torch.cat([values, item[1]], 1)
                seen = mask.dtype is torch.bool  # else 0 is added to their scores
                mask = F.pad(mask, (0, item[0].shape[1]), value=seen)
            own = q[call.rows].view(len(call.sequences), -1, *q.shape[1:])
            heads, keys, values = (part.transpose(1, 2) for part in (own, keys, values))
            made = F.scaled_dot_product_attention(
                heads, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
            )
            out[call.rows] = made.transpose(1, 2).flatten(0, 1)
        return out

    def _extended(
        self, call: Call, layer: int, k: Tensor, v: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Stores `k`, `v` of the rows of a call. Returns those of its sequences, [B, L, K, D]."""
        num_kept, sequences = None if window is None else window - 1, call.sequences
        if len(sequences) > 1:
            assert isinstance(self._attn, SideBySideAttention), "see _divided"
            return self._attn.extend_each(sequences, layer, k, v, num_kept)
        keys, values = self._attn.extend(sequences[0], layer, k, v, num_kept)
        return keys.unsqueeze(0), values.unsqueeze(0)

    def _item(self, call: Call, layer: int) -> tuple[Tensor, Tensor] | None:
        """Returns keys and values of the item of a call's only sequence, [1, L, K, D]."""
        item = None if self._cross is None else self._cross.of(call.sequences[0], layer)
        return None if item is None else (item[0].unsqueeze(0), item[1].unsqueeze(0))

    def _mask(self, number: int, num_keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Returns which keys each token of a call sees, [B, 1, n, L], or what is added to their
        scores, [B, H, n, L]. Shorter sequences begin with keys of nobody."""
        if (number, window) in self._masks:
            return self._masks[number, window]
        call = self._calls[number]
        lens = torch.tensor([_length(self._attn.sequences[own]) for own in call.sequences])
        count = len(call.rows) // len(call.sequences)
        distances = torch.arange(num_keys - count, num_keys)[:, None] - torch.arange(num_keys)
        distances = distances.to(call.rows.device)
        seen = distances >= 0
        if window is not None:
            seen &= distances < window
        padding = (num_keys - lens).to(call.rows.device)
        mask = seen & (torch.arange(num_keys, device=seen.device) >= padding[:, None, None])
        mask = mask[:, None]
        if self._bias is not None:
            bias = self._bias(distances.clamp(min=0)).to(dtype)
            mask = bias.masked_fill(~mask, -torch.inf)
        self._masks[number, window] = mask
        return mask

    def _divided(self) -> Iterator[Call]:
        """Yields the calls of the step: sequences that get one token each share one where they have
        about as many keys. Items are long, and to copy them side by side costs more than a call for
        each."""
        rows = self._attn.sequences
        can_share = self._cross is None and isinstance(self._attn, SideBySideAttention)
        single = [i for i, own in enumerate(rows) if can_share and own.end - own.start == 1]
        single.sort(key=lambda number: -rows[number].num_cached)
        begin = needed = 0
        for index, number in enumerate(single):
            padded = _length(rows[single[begin]]) * (index - begin + 1)
            if padded > MAX_PADDING * (needed + _length(rows[number])):
                yield _call(self._attn, single[begin:index])
                begin, needed = index, 0
            needed += _length(rows[number])
        if single:
            yield _call(self._attn, single[begin:])
        for number in sorted(set(range(len(rows))) - set(single)):
            yield _call(self._attn, [number])


def _length(rows: SequenceRows) -> int:
    """Returns the tokens of a sequence after the step."""
    return rows.num_cached + rows.end - rows.start


def _call(attn: SequenceAttention, numbers: Sequence[int]) -> Call:
    own = [attn.sequences[number] for number in numbers]
    rows = torch.tensor([row for part in own for row in range(part.start, part.end)])
    return Call(sequences=tuple(numbers), rows=rows)
