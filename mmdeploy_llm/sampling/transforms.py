"""Changes to logits before a token is chosen, each for all rows at once. N rows, V vocabulary.

Every function writes into `logits` [N, V] float32. Rows that a rule does not concern add nothing to
its index arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .slot import Ints, Slot


def shape_logits(logits: Tensor, slots: Sequence[Slot]) -> None:
    """All rules, in order: bias, grammar, bans, penalties. Temperature and filters come later."""
    _add_bias(logits, slots)
    for row, slot in enumerate(slots):
        if slot.grammar is not None:
            slot.grammar.mask(logits[row])
    _ban(logits, slots)
    _penalize(logits, slots)


def _places(arrays: Sequence[Ints], device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of every id, of all rows one behind the other."""
    rows = np.repeat(np.arange(len(arrays)), [len(ids) for ids in arrays])
    columns = np.concatenate(arrays) if arrays else rows
    return torch.from_numpy(rows).to(device), torch.from_numpy(columns).to(device)


def _add_bias(logits: Tensor, slots: Sequence[Slot]) -> None:
    if any(len(slot.bias_ids) for slot in slots):
        rows, columns = _places([slot.bias_ids for slot in slots], logits.device)
        bias = torch.from_numpy(np.concatenate([slot.bias for slot in slots])).to(logits.device)
        logits[rows, columns] += bias


def _ban(logits: Tensor, slots: Sequence[Slot]) -> None:
    rows, columns = _places([slot.banned() for slot in slots], logits.device)
    if len(rows):
        logits[rows, columns] = float("-inf")


def _penalize(logits: Tensor, slots: Sequence[Slot]) -> None:
    """Repetition (Keskar et al., CTRL, 2019: positive logits divided, negative multiplied) over
    prompt and output; presence and frequency over the output."""
    concerned = [(row, slot, slot.counts) for row, slot in enumerate(slots) if slot.counts]
    if not concerned:
        return
    lengths = [len(counts.ids) for _, _, counts in concerned]
    device = logits.device

    def spread(values: Sequence[float | None]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), lengths)).to(device)

    rows = torch.from_numpy(np.repeat([row for row, _, _ in concerned], lengths)).to(device)
    columns = torch.from_numpy(np.concatenate([c.ids for _, _, c in concerned])).to(device)
    counts = torch.from_numpy(np.concatenate([c.counts for _, _, c in concerned])).to(device)
    repetition = spread([slot.params.repetition_penalty for _, slot, _ in concerned])
    presence = spread([slot.params.presence_penalty for _, slot, _ in concerned])
    frequency = spread([slot.params.frequency_penalty for _, slot, _ in concerned])
    found = logits[rows, columns]
    found = torch.where(found > 0, found / repetition, found * repetition)
    found -= presence * (counts > 0) + frequency * counts
    logits[rows, columns] = found
