"""Log-probabilities of chosen tokens and of the most probable ones, from unchanged logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdeploy_llm.outputs import Logprob, TokenLogprobs

from .largest import largest

CHUNK = 8  # rows in float32 at once: temporaries stay small


def prompt_logprobs(logits: Tensor, next_token_ids: Tensor, k: int) -> tuple[TokenLogprobs, ...]:
    """For each row of [T, V] the entry of the token that follows, [T] on any device.

    The token comes first with its own rank, then the `k` most probable by rank; -1: all. Equal
    logits are ranked by token id. Rows do not influence each other.
    """
    ids = next_token_ids.to(logits.device)
    entries: list[TokenLogprobs] = []
    for first in range(0, len(logits), CHUNK):
        part = slice(first, first + CHUNK)
        entries += measure(logits[part], ids[part], k).entries()
    return tuple(entries)


def sampled_logprobs(
    logits: Tensor, token_ids: Tensor, num_logprobs: NDArray[np.int64]
) -> tuple[TokenLogprobs, ...]:
    """As `prompt_logprobs`, with a number of candidates [T] of its own for each row."""
    entries: dict[int, TokenLogprobs] = {}
    for k in np.unique(num_logprobs).tolist():
        rows = torch.from_numpy(np.flatnonzero(num_logprobs == k))
        is_all = len(rows) == len(logits)
        part = logits if is_all else logits[rows.to(logits.device)]
        entries.update(zip(rows.tolist(), prompt_logprobs(part, token_ids[rows], k), strict=True))
    return tuple(entries[row] for row in range(len(logits)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Of T rows: their tokens and behind them the k most probable ones, ids and log-probabilities
    [T, 1 + k] each, and the ranks of the former [T]."""

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor

    def each(self, move: Callable[[Tensor], Tensor]) -> Measured:
        """With `move` of each tensor."""
        parts = {field.name: move(getattr(self, field.name)) for field in fields(self)}
        return Measured(**parts)

    def entries(self) -> Iterator[TokenLogprobs]:
        """Of each row; waits for the device if the tensors lie there."""
        parts = (self.token_ids, self.logprobs, self.ranks)
        for ids, values, rank in zip(*(part.tolist() for part in parts), strict=True):
            entry = {ids[0]: Logprob(logprob=values[0], rank=rank)}
            for place in range(1, len(ids)):
                entry.setdefault(ids[place], Logprob(logprob=values[place], rank=place))
            yield entry


def measure(logits: Tensor, token_ids: Tensor, k: int) -> Measured:
    """What `prompt_logprobs` tells of rows [T, V], where the logits are; on CUDA nothing is waited
    for."""
    logits = logits.float()
    logprobs = logits.log_softmax(dim=1)
    best = _best(logits, logits.shape[1] if k < 0 else min(k, logits.shape[1]))
    column = token_ids[:, None]
    ids = torch.cat([column, best], dim=1)
    return Measured(token_ids=ids, logprobs=logprobs.gather(1, ids), ranks=_ranks(logits, column))


def _ranks(logits: Tensor, column: Tensor) -> Tensor:
    """[T]: 1 + how many are larger, or as large with a lower id, than the token of `column`."""
    own = logits.gather(1, column)
    num_larger = (logits > own).count_nonzero(dim=1)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return 1 + num_larger + ((logits == own) & (ids < column)).count_nonzero(dim=1)


def _best(logits: Tensor, k: int) -> Tensor:
    """Ids of the k largest of each row, [T, k], equal ones by rising id."""
    num_rows, vocab_size = logits.shape
    if k == 0:
        return torch.empty(num_rows, 0, dtype=torch.int64, device=logits.device)
    if k == vocab_size:
        return logits.sort(dim=1, descending=True, stable=True).indices
    if logits.is_cuda:
        return _best_by_keys(logits, k)
    values, ids = largest(logits, k + 1)
    is_cut_through_ties = values[:, -1] == values[:, -2]  # which ids were named is then open
    ids, order = ids[:, :k].sort(dim=1)
    order = values.gather(1, order).sort(dim=1, descending=True, stable=True).indices
    ids = ids.gather(1, order)
    for row in is_cut_through_ties.nonzero()[:, 0].tolist():
        ids[row] = logits[row].sort(descending=True, stable=True).indices[:k]
    return ids


def _best_by_keys(logits: Tensor, k: int) -> Tensor:
    """As `_best`, without looking for equal logits: by integers that order values, then ids."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 is 0.0
    rising = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    behind = torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    return (rising | behind).topk(k, dim=1).indices
