"""Samples the tokens after drafts: one position of all requests at a time, as decode steps do.

    known  drafts     the step computes logits after each of these
    ..  a  b  c  d
        b' c' x       sampled; b' = b, c' = c, so x is sampled too; x is not d: it ends here

Each position is an ordinary call of the sampler, whose state has recorded the tokens before it:
rules, grammars, draws and log-probabilities are those of a run without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmdeploy_llm.engine.runner.sampling import Sampler
from mmdeploy_llm.layers.transfer import to_device

from .outcome import StepOutcome
from .sample_rows import DraftRows, SampleRows
from .slots import Slots


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
