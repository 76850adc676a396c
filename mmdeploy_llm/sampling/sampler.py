"""Sampler: the next token of every request, from its logits and what it has generated so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.outputs import TokenLogprobs

from .draw import Filters, draw
from .grammar import GrammarBackend
from .logprobs import token_logprobs
from .slot import Slot, SlotRequest
from .transforms import shape_logits
from .uniform import uniform

NOT_FINITE = "the model's logits are not finite numbers: its weights or its input are broken"
NOTHING_LEFT = "no token may be generated: bans, grammar and filters together leave none"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """By row: the token ids, their log-probabilities where asked for, and what failed.

    A row in `errors` has a token id without a meaning.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    errors: Mapping[int, str]


class Sampler:
    """Holds the state of the requests in the runner's slots; `sample` moves it on.

    Rows never influence each other: a request gets the same tokens in any batch.
    """

    def __init__(self, grammars: GrammarBackend | None = None) -> None:
        self._grammars = grammars
        self._slots: dict[int, Slot] = {}

    def add(self, slot: int, request: SlotRequest) -> None:
        """Takes a request in, with the tokens it generated before a preemption."""
        guided, grammar = request.params.guided_decoding, None
        if guided is not None:
            if self._grammars is None:
                raise ConfigError("guided_decoding needs guided_decoding_backend='auto'")
            grammar = self._grammars.matcher(guided)
        self._slots[slot] = Slot(request, grammar)

    def remove(self, slot: int) -> None:
        """Forgets the request in `slot`."""
        self._slots.pop(slot, None)

    def sample(self, logits: Tensor, slots: NDArray[np.int64] | Sequence[int]) -> SampleResult:
        """One token for each row of `logits` [N, V], for the requests in `slots` [N]."""
        states = [self._slots[int(slot)] for slot in slots]
        best, token_ids = logits.max(-1)  # NaN wins, so that it is seen
        special = [row for row, state in enumerate(states) if not state.is_plain]
        if special:
            chosen, highest = _choose(logits, states, special)
            token_ids[special] = chosen
            best[special] = highest.to(best.dtype)
        found = token_ids.tolist()
        errors = {
            row: NOTHING_LEFT if value == float("-inf") else NOT_FINITE
            for row, value in enumerate(best.tolist())
            if not abs(value) < float("inf")
        }
        logprobs = _logprobs(logits, token_ids, states)
        for row, state in enumerate(states):
            if row not in errors:
                state.append(found[row])
        return SampleResult(token_ids=found, logprobs=logprobs, errors=errors)


def _choose(logits: Tensor, states: Sequence[Slot], rows: list[int]) -> tuple[Tensor, Tensor]:
    """Token ids [R] of the rows that are not plain, and the largest logit each had left [R]."""
    own = [states[row] for row in rows]
    shaped = logits[rows].float()
    shape_logits(shaped, own)
    highest, token_ids = shaped.max(-1)
    is_sound = highest.isfinite().tolist()
    random = [i for i, s in enumerate(own) if not s.params.is_greedy and is_sound[i]]
    if random:
        token_ids[random] = draw(shaped[random], [_filters(own[i]) for i in random])
    for place, state in enumerate(own):
        forced = state.budget.forced if state.budget else None
        if forced is not None:
            token_ids[place] = forced
    return token_ids, highest


def _filters(slot: Slot) -> Filters:
    params = slot.params
    assert params.temperature is not None
    assert params.seed is not None
    return Filters(
        temperature=params.temperature,
        min_p=params.min_p or 0.0,
        top_k=max(params.top_k or 0, 0),
        top_p=1.0 if params.top_p is None else params.top_p,
        number=uniform(params.seed, len(slot.output_ids)),
    )


def _logprobs(
    logits: Tensor, token_ids: Tensor, states: Sequence[Slot]
) -> list[TokenLogprobs | None]:
    found: list[TokenLogprobs | None] = [None] * len(states)
    for row, state in enumerate(states):
        if state.params.logprobs is not None:
            own = slice(row, row + 1)
            (found[row],) = token_logprobs(logits[own], token_ids[own], state.params.logprobs)
    return found
