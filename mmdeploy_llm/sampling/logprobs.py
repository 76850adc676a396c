"""Log-probabilities of chosen tokens and of the most probable ones, from unchanged logits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdeploy_llm.outputs import Logprob, TokenLogprobs

from .largest import largest

CHUNK = 32  # rows in float32 at once


def prompt_logprobs(logits: Tensor, next_token_ids: Tensor, k: int) -> tuple[TokenLogprobs, ...]:
    """For each row of [T, V] the entry of the token that follows, [T] on any device.

    The token comes first with its own rank, then the `k` most probable by rank; -1: all. Equal
    logits are ranked by token id.
    """
    ids = next_token_ids.to(logits.device)
    entries: list[TokenLogprobs] = []
    for first in range(0, len(logits), CHUNK):
        part = slice(first, first + CHUNK)
        entries += _entries(logits[part].float(), ids[part], k)
    return tuple(entries)


def sampled_logprobs(
    logits: Tensor, token_ids: Tensor, num_logprobs: NDArray[np.int64]
) -> Iterable[TokenLogprobs]:
    """As `prompt_logprobs`, with a number of candidates [T] of its own for each row."""
    entries: dict[int, TokenLogprobs] = {}
    for k in np.unique(num_logprobs).tolist():
        rows = torch.from_numpy(np.flatnonzero(num_logprobs == k)).to(logits.device)
        found = prompt_logprobs(logits[rows], token_ids.to(logits.device)[rows], k)
        entries.update(zip(rows.tolist(), found, strict=True))
    return [entries[row] for row in range(len(logits))]


def _entries(logits: Tensor, token_ids: Tensor, k: int) -> Iterator[TokenLogprobs]:
    logprobs = logits.log_softmax(dim=1)
    k = logits.shape[1] if k < 0 else min(k, logits.shape[1])
    column = token_ids[:, None]
    own = logits.gather(1, column)
    is_earlier = torch.arange(logits.shape[1], device=logits.device) < column
    ranks = 1 + (logits > own).sum(dim=1) + ((logits == own) & is_earlier).sum(dim=1)
    best = _best(logits, k)
    values = logprobs.gather(1, torch.cat([column, best], dim=1)).tolist()
    for token_id, rank, ids, row in zip(
        token_ids.tolist(), ranks.tolist(), best.tolist(), values, strict=True
    ):
        entry = {token_id: Logprob(logprob=row[0], rank=rank)}
        for place, (candidate, value) in enumerate(zip(ids, row[1:], strict=True), start=1):
            entry.setdefault(candidate, Logprob(logprob=value, rank=place))
        yield entry


def _best(logits: Tensor, k: int) -> Tensor:
    """The k largest of each row, [T, k], equal ones by rising id."""
    num_rows, vocab_size = logits.shape
    if k == 0:
        return torch.empty(num_rows, 0, dtype=torch.int64, device=logits.device)
    if k == vocab_size:
        return logits.sort(dim=1, descending=True, stable=True).indices
    values, _ = largest(logits, k)
    # Which of the ids that tie at the end were named is open: look them all up.
    rows, ids = (logits >= values[:, -1:]).nonzero(as_tuple=True)
    order = logits[rows, ids].sort(descending=True, stable=True).indices
    order = order[rows[order].sort(stable=True).indices]
    starts = torch.searchsorted(rows, torch.arange(num_rows, device=logits.device))
    picked = starts[:, None] + torch.arange(k, device=logits.device)
    return ids[order][picked]
