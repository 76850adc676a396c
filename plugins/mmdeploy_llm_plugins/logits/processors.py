"""The logits processors of this plugin. Shapes: R requests, V vocabulary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmdeploy_llm.hooks import LogitsContext, LogitsProcessor, LogitsRow

WINDOW, PENALTY = 64, 1.2  # defaults of RepetitionWindow


class LogitBias(LogitsProcessor):
    """Adds a number to the logits of some tokens. FastDeploy's argument: `logit_bias`, a dict of
    token id, as a number or as text, to number."""

    def __init__(self, context: LogitsContext) -> None:
        self._vocab_size = context.vocab_size

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raises ValueError unless `logit_bias` is a dict of token ids to finite numbers."""
        biases = arguments.get("logit_bias")
        if not isinstance(biases, Mapping):
            raise ValueError(f"logit_bias must be a dict of token ids to numbers, got {biases!r}")
        for key, value in biases.items():
            token_id = _token_id(key)
            if token_id is None or not 0 <= token_id < self._vocab_size:
                raise ValueError(
                    f"logit_bias has token id {key!r}; allowed are 0 to {self._vocab_size - 1}"
                )
            if not _is_number(value):
                raise ValueError(f"logit_bias[{key!r}] must be a finite number, got {value!r}")

    def start(self, row: LogitsRow) -> tuple[Tensor, Tensor]:
        """Returns ids [B] and biases [B]."""
        biases = {int(key): value for key, value in row.arguments["logit_bias"].items()}
        values = torch.tensor(list(biases.values()), dtype=torch.float64).clamp(-1e30, 1e30)
        return torch.tensor(list(biases), dtype=torch.int64), values.float()

    def apply(self, logits: Tensor, rows: Sequence[LogitsRow]) -> Tensor:
        """Adds the biases to the rows of [R, V]."""
        index = _flat_index([row.state[0] for row in rows], logits)
        values = torch.cat([row.state[1] for row in rows]).to(logits.device)
        logits.view(-1)[index] += values
        return logits


class RepetitionWindow(LogitsProcessor):
    """Penalizes the tokens among the last `repetition_window` generated ones (64): divides their
    positive logits, and multiplies the negative ones, by `repetition_window_penalty` (1.2).

    Unlike `repetition_penalty` it lets a long text use its words again.
    """

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raises ValueError for a window or a penalty out of range."""
        window = arguments.get("repetition_window", WINDOW)
        if type(window) is not int or window < 1:
            raise ValueError(f"repetition_window must be an integer above 0, got {window!r}")
        penalty = arguments.get("repetition_window_penalty", PENALTY)
        if not _is_number(penalty) or not 0.01 <= penalty <= 100:
            raise ValueError(
                f"repetition_window_penalty must be a number from 0.01 to 100, got {penalty!r}"
            )

    def apply(self, logits: Tensor, rows: Sequence[LogitsRow]) -> Tensor:
        """Penalizes the recent tokens of the rows of [R, V]."""
        recent = [_recent(row) for row in rows]
        index = _flat_index(recent, logits)
        penalties = torch.repeat_interleave(
            torch.tensor([_penalty(row) for row in rows]),
            torch.tensor([len(ids) for ids in recent]),
        ).to(logits.device)
        values = logits.view(-1)[index]
        logits.view(-1)[index] = torch.where(values > 0, values / penalties, values * penalties)
        return logits


def _recent(row: LogitsRow) -> Tensor:
    """Returns the different tokens of the window."""
    window = row.arguments.get("repetition_window", WINDOW)
    return torch.from_numpy(np.unique(np.array(row.output_token_ids[-window:], dtype=np.int64)))


def _penalty(row: LogitsRow) -> float:
    return float(row.arguments.get("repetition_window_penalty", PENALTY))


def _flat_index(ids: Sequence[Tensor], logits: Tensor) -> Tensor:
    """Returns the ids of each row as indices into the flattened logits."""
    vocab_size = logits.shape[1]
    index = torch.cat([row * vocab_size + own for row, own in enumerate(ids)])
    return index.to(logits.device)


def _token_id(key: object) -> int | None:
    try:
        return int(key) if isinstance(key, int | str) else None
    except ValueError:
        return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
