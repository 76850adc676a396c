"""SampleRows: which rows of a pass are sampled from. DraftRows: those of them that are drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from torch import Tensor

from mmdeploy_llm.values.plan import ScheduledTokens

from .batch import Ints


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
