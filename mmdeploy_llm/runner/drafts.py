"""Samples the tokens after drafts: one position of all requests at a time, as decode steps do.

    known  drafts     the step computes logits after each of these
    ..  a  b  c  d
        b' c' x       sampled; b' = b, c' = c, so x is sampled too; x is not d: it ends here

Each position is an ordinary call of the sampler, whose state has recorded the tokens before it:
rules, grammars, draws and log-probabilities are those of a run without drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from mmdeploy_llm.plan import SampledToken
from mmdeploy_llm.sampling import Sampler, SampleResult
from mmdeploy_llm.transfer import to_device

from .batch import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRows:
    """The drafts of a pass with N items that sample.

    drafts: [N] of each item. logits: [M, V] after each draft, in their order. starts: [N] row of
    the logits after each item's first draft.
    """

    drafts: tuple[tuple[int, ...], ...]
    logits: Tensor
    starts: Ints


def sample_drafts(
    sampler: Sampler, rows: DraftRows, slots: Ints, first: SampleResult
) -> dict[int, list[SampledToken]]:
    """Returns row -> all its tokens, for the rows whose first draft was right. first: the tokens
    before the drafts.

    A later position that fails ends its row's tokens: the next step samples it again, and fails.
    """
    found: dict[int, list[SampledToken]] = {}
    going = [row for row, drafts in enumerate(rows.drafts) if drafts and row not in first.errors]
    going = [row for row in going if first.token_ids[row] == rows.drafts[row][0]]
    for row in going:
        found[row] = [_token(first, row)]
    depth = 0
    while going:
        chosen = np.array(going, dtype=np.int64)
        logits = rows.logits[to_device(rows.starts[chosen] + depth, rows.logits.device)]
        result = sampler.sample(logits, slots[chosen])
        good = [(at, row) for at, row in enumerate(going) if at not in result.errors]
        for at, row in good:
            found[row].append(_token(result, at))
        depth += 1
        going = [row for at, row in good if rows.drafts[row][depth:][:1] == (result.token_ids[at],)]
    return found


def _token(result: SampleResult, row: int) -> SampledToken:
    return SampledToken(
        token_id=result.token_ids[row],
        logprobs=result.logprobs[row],
        is_certain=row in result.certain,
    )
