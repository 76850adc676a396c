"""Samples the tokens after drafts: one position of all requests at a time, as decode steps do.

    known  drafts     the step computes logits after each of these
    ..  a  b  c  d
        b' c' x       sampled; b' = b, c' = c, so x is sampled too; x is not d: it ends here

Each position is an ordinary call of the sampler, whose state has recorded the tokens before it:
rules, grammars, draws and log-probabilities are those of a run without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from torch import Tensor

from mmdeploy_llm.engine.runner.sampling.sampler import Sampler
from mmdeploy_llm.layers.transfer import to_device
from mmdeploy_llm.values.plan import ScheduledTokens

from .batch import Ints
from .outcome import StepOutcome
from .slots import Slots


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRows:
    """The drafts of N items, M in all. drafts: of each item. counts: [N] how many these are."""

    drafts: tuple[tuple[int, ...], ...]
    counts: Ints

    @classmethod
    def of(cls, items: Sequence[ScheduledTokens]) -> Self:
        """Collects the drafts of items."""
        drafts = tuple(item.drafts for item in items)
        return cls(drafts=drafts, counts=np.array([len(own) for own in drafts], dtype=np.int64))

    @property
    def starts(self) -> Ints:
        """[N] where the rows after each item's drafts start, among N rows and M after them."""
        return len(self.counts) + np.cumsum(self.counts) - self.counts

    def rows_after(self, last_rows: Ints) -> Ints:
        """Returns the [N] rows of the last known tokens, and then the [M] rows of all drafts.
        last_rows: [N] the last row of each item."""
        known = last_rows - self.counts
        bounds = zip((known + 1).tolist(), (last_rows + 1).tolist(), strict=True)
        return np.concatenate([known, *(np.arange(begin, end) for begin, end in bounds)])


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRows:
    """The rows of a pass that are sampled from: N items that sample a token.

    slots: [N] slots of the items. ends: [N] known tokens of their sequences. logits: [N, V], and
    then [M, V] after drafts. largest: first_argmax of the logits, where a recorded step has
    computed it already. drafts: whose they are; None where M is 0.
    """

    items: Sequence[ScheduledTokens]
    slots: Ints
    ends: Ints
    logits: Tensor
    largest: tuple[Tensor, Tensor] | None = None
    drafts: DraftRows | None = None


def sample_drafts(
    sampler: Sampler, slots: Slots, rows: SampleRows, drafts: DraftRows, outcome: StepOutcome
) -> None:
    """Samples on for as long as the tokens in `outcome` and in `slots` equal drafts, and adds the
    tokens to both. A position that fails ends its request's tokens: the next step samples it
    again, and fails."""
    names = [item.request_id for item in rows.items]
    last = [outcome.sampled.get(name) for name in names]
    starts, depth = drafts.starts, 0
    going = _right(range(len(names)), drafts, last, depth)
    while going:
        chosen = np.array(going, dtype=np.int64)
        logits = rows.logits[to_device(starts[chosen] + depth, rows.logits.device)]
        result = sampler.sample(logits, rows.slots[chosen])
        depth += 1
        slots.append(rows.slots[chosen], rows.ends[chosen] + depth, result.token_ids)
        for at, row in enumerate(going):
            name, last[row] = names[row], None
            if at in result.errors:
                continue
            last[row] = token_id = result.token_ids[at]
            outcome.later[name] = (*outcome.later.get(name, ()), token_id)
            logprobs = result.logprobs[at]
            if logprobs is not None:
                outcome.logprobs[name] = (*outcome.logprobs[name], logprobs)
            if at in result.certain:
                outcome.certain.add((name, depth))
        going = _right(going, drafts, last, depth)


def _right(
    rows: Sequence[int], drafts: DraftRows, last: Sequence[int | None], depth: int
) -> list[int]:
    """Returns the rows whose last token equals their draft number `depth`."""
    return [row for row in rows if drafts.drafts[row][depth : depth + 1] == (last[row],)]
