"""Log-probabilities of chosen tokens and of the most probable ones, before any sampling rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdeploy_llm.values.outputs.request_output import Logprob, TokenLogprobs
from mmdeploy_llm.values.plan import NewRequest, ScheduledTokens

from .largest import largest

CHUNK = 8  # rows in float32 at once, to bound temporaries


def prompt_logprobs(logits: Tensor, next_token_ids: Tensor, k: int) -> tuple[TokenLogprobs, ...]:
    """Returns an entry for each row of logits [T, V]. next_token_ids: [T] on any device.

    An entry holds the next token with its rank, then the `k` most probable tokens by rank; -1: all.
    Equal logits are ranked by token id. Rows do not influence each other.
    """
    ids = next_token_ids.to(logits.device)
    entries: list[TokenLogprobs] = []
    for first in range(0, len(logits), CHUNK):
        rows = slice(first, first + CHUNK)
        entries += measure(logits[rows], ids[rows], k).entries()
    return tuple(entries)


def sampled_logprobs(
    logits: Tensor, token_ids: Tensor, num_logprobs: NDArray[np.int64]
) -> tuple[TokenLogprobs, ...]:
    """Returns entries as `prompt_logprobs` does. num_logprobs: [T], the `k` of each row."""
    entries: dict[int, TokenLogprobs] = {}
    for k in np.unique(num_logprobs).tolist():
        rows = torch.from_numpy(np.flatnonzero(num_logprobs == k))
        is_all = len(rows) == len(logits)
        own = logits if is_all else logits[rows.to(logits.device)]
        entries.update(zip(rows.tolist(), prompt_logprobs(own, token_ids[rows], k), strict=True))
    return tuple(entries[row] for row in range(len(logits)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Log-probabilities of T rows, as tensors.

    token_ids, logprobs: [T, 1 + k], the row's own token followed by the k most probable ones.
    ranks: [T], of the own tokens.
    """

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor

    def each(self, move: Callable[[Tensor], Tensor]) -> Measured:
        """Returns a copy with `move` applied to each tensor."""
        moved = {field.name: move(getattr(self, field.name)) for field in fields(self)}
        return Measured(**moved)

    def entries(self) -> Iterator[TokenLogprobs]:
        """Yields the entry of each row; waits for the device if the tensors are on one."""
        lists = (x.tolist() for x in (self.token_ids, self.logprobs, self.ranks))
        for ids, values, rank in zip(*lists, strict=True):
            entry = {ids[0]: Logprob(logprob=values[0], rank=rank)}
            for column in range(1, len(ids)):
                entry.setdefault(ids[column], Logprob(logprob=values[column], rank=column))
            yield entry


def measure(logits: Tensor, token_ids: Tensor, k: int) -> Measured:
    """Computes the values of `prompt_logprobs` for rows [T, V] on the device of the logits, without
    waiting for CUDA."""
    logits = logits.float()
    logprobs = logits.log_softmax(dim=1)
    best = _best(logits, logits.shape[1] if k < 0 else min(k, logits.shape[1]))
    column = token_ids[:, None]
    ids = torch.cat([column, best], dim=1)
    ranks = _ranks(logits, column) if logits.is_cuda else _ranks_with(logits, column, best)
    return Measured(token_ids=ids, logprobs=logprobs.gather(1, ids), ranks=ranks)


def are_certain(logits: Tensor, token_ids: Tensor, thresholds: Tensor) -> Tensor:
    """Returns [T] bool: whether the log-probability of each row's token is above its threshold.
    logits: [T, V]. Does not wait for CUDA."""
    found = []
    for first in range(0, len(logits), CHUNK):
        rows = slice(first, first + CHUNK)
        own = logits[rows].float()
        # logsumexp would add in an order that depends on the number of rows.
        logprobs = own.log_softmax(dim=1).gather(1, token_ids[rows][:, None])[:, 0]
        found.append(logprobs > thresholds[rows])
    return torch.cat(found)


def _ranks(logits: Tensor, column: Tensor) -> Tensor:
    """Returns [T]: 1 + the number of logits that are larger than that of the token in `column`
    [T, 1], or equal with a lower id."""
    own = logits.gather(1, column)
    num_larger = (logits > own).count_nonzero(dim=1)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return 1 + num_larger + ((logits == own) & (ids < column)).count_nonzero(dim=1)


def _ranks_with(logits: Tensor, column: Tensor, best: Tensor) -> Tensor:
    """Returns the same ranks as `_ranks`, on a CPU. best: [T, k], of `_best`: the rank of a token
    among them is its place, so that the logits are read for the others only."""
    is_own = best == column
    ranks = 1 + is_own.long().argmax(dim=1) if best.shape[1] else column[:, 0].clone()
    rest = is_own.any(dim=1).logical_not_().nonzero()[:, 0]
    if len(rest):
        ranks[rest] = _ranks(logits[rest], column[rest])
    return ranks


def _best(logits: Tensor, k: int) -> Tensor:
    """Returns the ids of the k largest logits of each row, [T, k], equal ones by ascending id."""
    num_rows, vocab_size = logits.shape
    if k == 0:
        return torch.empty(num_rows, 0, dtype=torch.int64, device=logits.device)
    if k == vocab_size:
        return logits.sort(dim=1, descending=True, stable=True).indices
    if logits.is_cuda:
        return _best_by_keys(logits, k)
    values, ids = largest(logits, k + 1)
    has_tie_at_end = values[:, -1] == values[:, -2]  # any of the equal ids may be among the k
    ids, order = ids[:, :k].sort(dim=1)
    order = values.gather(1, order).sort(dim=1, descending=True, stable=True).indices
    ids = ids.gather(1, order)
    for row in has_tie_at_end.nonzero()[:, 0].tolist():
        ids[row] = logits[row].sort(descending=True, stable=True).indices[:k]
    return ids


def _best_by_keys(logits: Tensor, k: int) -> Tensor:
    """Returns the same ids as `_best`, without a search for equal logits, which would wait for the
    device. Integer keys hold the value in their high bits and the id in their low bits."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 is 0.0
    high = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    low = torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    return (high | low).topk(k, dim=1).indices


def logprobs_of(
    logits: Tensor, rows: NDArray[np.int64], chosen: Sequence[int], wanted: NDArray[np.int64]
) -> tuple[TokenLogprobs | None, ...]:
    """Returns [N] entries, None for all but `rows`, whose logits are given. wanted: [N], number of
    candidates of each row."""
    entries: list[TokenLogprobs | None] = [None] * len(chosen)
    ids = torch.tensor(chosen)[torch.from_numpy(rows)]
    found = sampled_logprobs(logits, ids, wanted[rows])
    for row, entry in zip(rows.tolist(), found, strict=True):
        entries[row] = entry
    return tuple(entries)


MAX_ROWS = 256  # rows of logits at once: those of a whole step would take gigabytes


def wants_prompt_logprobs(request: NewRequest, item: ScheduledTokens) -> bool:
    """Whether the item holds prompt tokens whose log-probabilities were requested."""
    return request.params.prompt_logprobs is not None and item.start < request.prompt_len


def prompt_entries(
    request: NewRequest,
    item: ScheduledTokens,
    hidden: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    of_rows: Callable[[slice], AbstractContextManager[object]] = nullcontext,
) -> tuple[TokenLogprobs | None, ...]:
    """Returns an entry for each prompt token that follows one of the item's tokens: the logits at
    token i score token i + 1. The entries of a prompt's first item begin with None, for its first
    token; None stands, too, for a token that the model embeds but has no logit of.

    hidden: [num_tokens, hidden], the item's hidden states. of_rows: says within its context which
    of these rows the logits are of."""
    count = request.params.prompt_logprobs
    assert count is not None, "checked by wants_prompt_logprobs"
    num_next = min(item.num_tokens, request.prompt_len - 1 - item.start)
    following = torch.tensor(request.token_ids[item.start + 1 : item.start + 1 + num_next])
    entries: list[TokenLogprobs | None] = [None] if item.start == 0 else []
    for first in range(0, num_next, MAX_ROWS):
        chunk = slice(first, min(first + MAX_ROWS, num_next))
        with of_rows(chunk):
            logits = logits_of(hidden[chunk])
        has_logit = following[chunk] < logits.shape[1]
        found = prompt_logprobs(logits, following[chunk] * has_logit, count)
        entries += [own if has else None for own, has in zip(found, has_logit, strict=True)]
    return tuple(entries)
