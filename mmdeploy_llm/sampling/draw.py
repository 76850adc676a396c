"""Temperature, min-p, top-k and top-p, and the draw itself. R rows, V vocabulary.

The plain way sorts whole rows. The quick way sorts the PREFIX most probable tokens of a row, and
falls back to the whole row where they do not hold the mass that top-p asks for. What a row gives
never depends on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PREFIX = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """One row's filters. top_k 0: off. top_p 1: off. number: uniform in [0, 1)."""

    temperature: float
    min_p: float
    top_k: int
    top_p: float
    number: float


def draw(logits: Tensor, filters: Sequence[Filters], prefix: int = PREFIX) -> Tensor:
    """One token id for each row of `logits` [R, V] float32: [R] int64. Changes `logits`.

    Order: temperature, min-p, top-k, top-p. min-p keeps tokens of at least min_p times the largest
    probability; top-p the smallest set of most probable tokens whose mass reaches it, within what
    top-k left.
    """
    logits /= _column([f.temperature for f in filters], logits)
    _apply_min_p(logits, filters)
    tokens = torch.empty(len(filters), dtype=torch.int64, device=logits.device)
    num_vocab = logits.shape[1]
    free = [row for row, f in enumerate(filters) if not 0 < f.top_k < num_vocab and f.top_p >= 1]
    cut = [row for row in range(len(filters)) if row not in set(free)]
    if free:
        tokens[free] = _invert(_probabilities(logits[free]), [filters[row] for row in free])
    if cut:
        tokens[cut] = _draw_sorted(logits[cut], [filters[row] for row in cut], prefix)
    return tokens


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _apply_min_p(logits: Tensor, filters: Sequence[Filters]) -> None:
    if any(f.min_p > 0 for f in filters):
        least = logits.amax(-1, keepdim=True) + _column([f.min_p for f in filters], logits).log()
        logits.masked_fill_(logits < least, float("-inf"))


def _draw_sorted(logits: Tensor, filters: Sequence[Filters], prefix: int) -> Tensor:
    """Rows with top-k or top-p. A row's way depends on its own filters and logits only."""
    num_vocab = logits.shape[1]
    tokens = torch.empty(len(filters), dtype=torch.int64, device=logits.device)
    short = [row for row, f in enumerate(filters) if f.top_k <= prefix < num_vocab]
    missed = [row for row in range(len(filters)) if row not in set(short)]
    if short:
        found, is_enough = _draw_prefix(logits[short], [filters[row] for row in short], prefix)
        tokens[short] = found
        missed += [
            row for row, is_good in zip(short, is_enough.tolist(), strict=True) if not is_good
        ]
    if missed:
        found, _ = _draw_prefix(logits[missed], [filters[row] for row in missed], num_vocab)
        tokens[missed] = found
    return tokens


def _draw_prefix(logits: Tensor, filters: Sequence[Filters], size: int) -> tuple[Tensor, Tensor]:
    """[R] ids drawn from the `size` most probable tokens, and whether these held enough mass."""
    values, ids = logits.topk(size, dim=-1)  # [R, size], descending
    top_k = torch.tensor([f.top_k or logits.shape[1] for f in filters], device=logits.device)
    is_kept = torch.arange(size, device=logits.device) < top_k[:, None]
    values = values.masked_fill(~is_kept, float("-inf")).double()
    # The mass that top-p speaks of: of the top-k tokens, or of the whole row.
    whole = torch.where(top_k <= size, values.logsumexp(-1), logits.double().logsumexp(-1))
    probs = (values - whole[:, None]).exp()
    mass = probs.cumsum(-1)
    top_p = _column([f.top_p for f in filters], mass)
    probs = probs.masked_fill(mass - probs >= top_p, 0.0)  # the first token always stays
    is_enough = (top_k <= size) | (mass[:, -1] >= top_p[:, 0])
    return ids.gather(1, _invert(probs, filters)[:, None])[:, 0], is_enough


def _probabilities(logits: Tensor) -> Tensor:
    return logits.double().softmax(-1)


def _invert(weights: Tensor, filters: Sequence[Filters]) -> Tensor:
    """[R] places drawn in proportion to `weights` [R, n] by each row's number (inverse CDF)."""
    edges = weights.cumsum(-1)
    goal = _column([f.number for f in filters], weights) * edges[:, -1:]
    # The first place whose edge lies above the goal: never one of weight 0.
    return torch.searchsorted(edges, goal, right=True)[:, 0].clamp_(max=weights.shape[1] - 1)
