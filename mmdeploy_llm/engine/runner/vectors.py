"""Hands the hidden states of prompts that want no text to the pooler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdeploy_llm.layers.pooling.pooler import Pooler, PromptRows
from mmdeploy_llm.layers.transfer import to_device
from mmdeploy_llm.values.plan import RequestFailure, ScheduledTokens

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


def token_types(
    scheduled: Sequence[ScheduledTokens], slots: Slots, device: torch.device
) -> Tensor | None:
    """Returns the types of a step's tokens, see ForwardInputs; None where no request has them."""
    if not slots.num_wanting:
        return None
    found = [slots[item.request_id].request.token_types for item in scheduled]
    if all(types is None for types in found):
        return None
    parts = [
        np.zeros(item.num_tokens, dtype=np.int64)
        if types is None
        else np.array(types[item.start : item.start + item.num_tokens], dtype=np.int64)
        for item, types in zip(scheduled, found, strict=True)
    ]
    return to_device(np.concatenate(parts), device)
