"""Applies the deterministic rules to logits, in place: bias, bans and penalties.

Only the logits that a rule names are read and written, through flat indices into [R, V]. A grammar
is the exception: it allows or bans every token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdeploy_llm.layers.transfer import to_device

from .grammar import ban_tokens
from .guide import Guide
from .state import HUGE, TINY, SlotState


def adjust(logits: Tensor, states: Sequence[SlotState], bans_stops: NDArray[np.bool_]) -> None:
    """Applies logit_bias, grammar, min_tokens, bad words, no_repeat_ngram_size, repetition,
    presence and frequency penalty to contiguous float32 logits [R, V], in this order.

    bans_stops: [R], whether the ids that would stop the request are banned.
    """
    _add_biases(logits, states)
    _apply_grammars(logits, states)
    _ban(logits, states, bans_stops)
    _penalize(logits, states)


def _add_biases(logits: Tensor, states: Sequence[SlotState]) -> None:
    index = _flat_index([state.bias_ids for state in states], logits)
    values = np.concatenate([state.bias_values for state in states])
    logits.view(-1)[index] += _tensor(values, logits)


def _apply_grammars(logits: Tensor, states: Sequence[SlotState]) -> None:
    guides: dict[int, Guide] = {}
    for row, state in enumerate(states):
        if state.grammar is not None and not state.num_before:
            guides[row] = state.grammar
    if guides:
        ban_tokens(logits, guides)


def _ban(logits: Tensor, states: Sequence[SlotState], bans_stops: NDArray[np.bool_]) -> None:
    vocab_size = logits.shape[1]
    ids = []
    for state, has_ban in zip(states, bans_stops, strict=True):
        now = np.fromiter(state.banned_now(), dtype=np.int64)
        now = now[(now >= 0) & (now < vocab_size)]  # a placeholder id may exceed the vocabulary
        has_ban = has_ban and not (state.grammar is not None and state.grammar.must_end)
        own = np.concatenate([state.banned_ids, now, *([state.stop_ids] if has_ban else [])])
        ids.append(own[:0] if state.num_before else own)
    logits.view(-1)[_flat_index(ids, logits)] = -torch.inf


def _penalize(logits: Tensor, states: Sequence[SlotState]) -> None:
    """Applies repetition_penalty to the tokens of prompt and output: divides positive logits,
    multiplies the others (Keskar et al., "CTRL", 2019; the sign rule is that of transformers). Then
    subtracts frequency_penalty times the count in the output, and presence_penalty once."""
    chosen = [(row, state, state.counts) for row, state in enumerate(states)]
    used = [(row, state.params, counts) for row, state, counts in chosen if counts is not None]
    if not used:
        return
    sizes = [len(counts.ids) for _, _, counts in used]
    rows = np.repeat([row for row, _, _ in used], sizes)
    ids = np.concatenate([counts.ids for _, _, counts in used])
    counts = np.concatenate([counts.counts for _, _, counts in used])
    penalties = np.array(
        [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for _, p, _ in used]
    )
    penalties[:, 0].clip(TINY, HUGE, out=penalties[:, 0])
    repetition, frequency, presence = np.repeat(penalties, sizes, axis=0).astype(np.float32).T
    index = _tensor(rows * logits.shape[1] + ids, logits)
    factors, subtracted = _tensor(repetition, logits), frequency * counts + presence * (counts > 0)
    values = logits.view(-1)[index]
    values = torch.where(values > 0, values / factors, values * factors)
    logits.view(-1)[index] = values - _tensor(subtracted, logits)


def _flat_index(ids: Sequence[NDArray[np.int64]], logits: Tensor) -> Tensor:
    """Returns the ids of each row as indices into the flattened logits."""
    rows = np.repeat(np.arange(len(ids)), [len(one) for one in ids])
    return _tensor(rows * logits.shape[1] + np.concatenate(ids), logits)


def _tensor(values: NDArray[np.generic], like: Tensor) -> Tensor:
    return to_device(values, like.device)
