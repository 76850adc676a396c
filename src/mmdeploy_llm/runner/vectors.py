"""Hands the hidden states of prompts that want no text to the pooler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mmdeploy_llm.plan import RequestFailure, ScheduledTokens
from mmdeploy_llm.pooling.pooler import Pooler, PromptRows

from .outcome import StepOutcome
from .slots import Slots


def add_vectors(
    scheduled: Sequence[ScheduledTokens],
    last_rows: NDArray[np.int64],
    slots: Slots,
    pooler: Pooler,
    hidden: Tensor,
    outcome: StepOutcome,
) -> None:
    """Adds the vectors of the prompts that end with this pass, and keeps what the others need.
    last_rows: [B] row of each item's last token. hidden: [T, H]."""
    rows = []
    for item, last in zip(scheduled, last_rows.tolist(), strict=True):
        request = slots[item.request_id].request
        if request.wanted is not None:
            own = PromptRows(
                request_id=item.request_id,
                wanted=request.wanted,
                start=item.start,
                first=last + 1 - item.num_tokens,
                end=last + 1,
                token_ids=request.token_ids,
                is_last=item.start + item.num_tokens == request.prompt_len,
            )
            rows.append(own)
    for request_id, found in pooler.add(rows, hidden).items() if rows else ():
        if isinstance(found, RequestFailure):
            outcome.errors[request_id] = found
        else:
            outcome.vectors[request_id] = found
