"""DeviceSampler: the Sampler whose rules and draws are kernels, and whose tokens the next step can
start from before the host has them.

logits [N, V] --> needing the host (grammar, n-grams, longer bad words): adjust.py, as in Sampler
              --> all others, the draw, and the state of each slot: cuda/choose.py
              --> token ids and log-probabilities on the device, and on their way to the host
    finish    --> the host has them: errors, entries, trackers
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdeploy_llm.cuda import choose as kernels
from mmdeploy_llm.outputs import TokenLogprobs

from .adjust import adjust
from .grammar import GrammarBackend
from .logprobs import Measured, measure
from .sampler import NOT_FINITE, NOTHING_ALLOWED, Sampler, SampleResult
from .state import NO_LOGPROBS, SlotRequest, SlotState
from .tables import SlotTables
from .upload import upload

CHUNK = 32  # rows whose log-probabilities are measured at once: temporaries stay small
MESSAGES = {kernels.NOT_FINITE: NOT_FINITE, kernels.NOTHING_ALLOWED: NOTHING_ALLOWED}


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingSample:
    """What a launch will have come to.

    token_ids: [N] int64 on the device, 0 where the row failed. finish: waits for it; called once,
    in the order of the launches.
    """

    token_ids: Tensor
    finish: Callable[[], SampleResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launched:
    """index: [N] slots. arrived: [2, N] token ids and what became of them, on the host once `wait`
    has returned. tracked: see SamplingState. measured: log-probabilities of some rows, on the host
    then too."""

    index: NDArray[np.int64]
    arrived: Tensor
    wait: Callable[[], None]
    tracked: Mapping[int, SlotState]
    measured: Sequence[tuple[NDArray[np.int64], Measured]]


class DeviceSampler(Sampler):
    """Gives the tokens of a Sampler, but for roundings of the device's arithmetic."""

    def __init__(
        self,
        *,
        max_num_slots: int,
        vocab_size: int,
        device: torch.device,
        grammars: GrammarBackend | None = None,
        tiling: kernels.Tiling | None = None,
    ) -> None:
        super().__init__(
            max_num_slots=max_num_slots, vocab_size=vocab_size, device=device, grammars=grammars
        )
        self._device = device
        self._tiling = tiling
        self._tables = SlotTables(max_num_slots, vocab_size, device)

    def add(self, slot: int, request: SlotRequest) -> None:
        """See Sampler."""
        super().add(slot, request)
        state = self._state[slot]
        is_random = bool(self._state.is_random[slot])
        self._tables.add(slot, self._state.numbers(slot), state, is_random=is_random)
        if not state.needs_host:
            self._state.hand_over(slot)

    def needs_host(self, slots: Sequence[int] | NDArray[np.int64]) -> bool:
        """Whether a request in `slots` is launched only after the last one was finished."""
        return bool(self._state.tracked(np.asarray(slots, dtype=np.int64)))

    def sample(
        self,
        logits: Tensor,
        slots: Sequence[int] | NDArray[np.int64] | Tensor,
        *,
        largest: tuple[Tensor, Tensor] | None = None,
    ) -> SampleResult:
        """See Sampler."""
        return self.launch(logits, slots, largest=largest).finish()

    @torch.inference_mode()
    def launch(
        self,
        logits: Tensor,
        slots: Sequence[int] | NDArray[np.int64] | Tensor,
        *,
        largest: tuple[Tensor, Tensor] | None = None,
    ) -> PendingSample:
        """As `sample`, without waiting for the device. The logits may be overwritten by later work
        of the device."""
        index = np.asarray(slots, dtype=np.int64)
        assert logits.shape == (len(index), self._vocab_size), f"logits are {tuple(logits.shape)}"
        out = self._choose_on_device(logits, index, largest)
        self._tables.advance(index)
        measured = [*self._measured(logits, index, out[0])]
        launched = _Launched(
            index=index,
            arrived=_to_host(out),
            tracked=self._state.tracked(index),
            measured=[(rows, one.each(_to_host)) for rows, one in measured],
            wait=_arrival(self._device),
        )
        return PendingSample(token_ids=out[0], finish=lambda: self._finish(launched))

    def _choose_on_device(
        self,
        logits: Tensor,
        index: NDArray[np.int64],
        largest: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Token ids and what became of them, [2, N] int64."""
        forced = self._state.forced(index)
        is_random = self._state.is_random[index]
        is_plain = not (is_random.any() or forced or self._tables.has_rules(index).any())
        adjusted = self._adjusted(logits, index, list(forced))
        if is_plain and largest is not None and adjusted is logits:
            token_ids, peaks = largest
            has_failed = (peaks.abs() < torch.inf).logical_not()  # fewer launches than isfinite
            return torch.stack([token_ids.masked_fill(has_failed, 0), has_failed])
        forced_ids = None
        if forced:
            ids = np.full(len(index), -1)
            ids[list(forced)] = list(forced.values())
            forced_ids = upload(ids, self._device)
        return kernels.choose(
            adjusted,
            upload(index, self._device),
            self._tables.rules(),
            weighs=self._state.is_mixed(index[is_random]),
            forced=forced_ids,
            tiling=self._tiling,
        )

    def _measured(
        self, logits: Tensor, index: NDArray[np.int64], token_ids: Tensor
    ) -> Iterator[tuple[NDArray[np.int64], Measured]]:
        """The log-probabilities that are asked for, by rows with equally many candidates."""
        wanted = self._state.num_logprobs[index]
        for k in np.unique(wanted[wanted != NO_LOGPROBS]).tolist():
            for rows in _chunks(np.flatnonzero(wanted == k)):
                places = upload(rows, self._device)
                part, own = (x.index_select(0, places) for x in (logits, token_ids))
                yield rows, measure(part, own, k)

    def _adjusted(self, logits: Tensor, index: NDArray[np.int64], forced: Sequence[int]) -> Tensor:
        """The logits, changed where the host has rules."""
        is_adjusted = self._state.needs_transforms(index)
        is_adjusted[forced] = False
        rows = np.flatnonzero(is_adjusted)
        if not len(rows):
            return logits
        places, slots = upload(rows, self._device), index[rows]
        part = logits.index_select(0, places).float()
        states = [self._state[slot] for slot in slots.tolist()]
        adjust(part, states, self._state.holds_stops(slots))
        return logits.float().index_copy(0, places, part)

    def _finish(self, launched: _Launched) -> SampleResult:
        launched.wait()
        chosen, outcomes = launched.arrived.tolist()
        errors = {row: MESSAGES[what] for row, what in enumerate(outcomes) if what != kernels.OK}
        for row, state in launched.tracked.items():
            slot = launched.index[row]
            if row not in errors and self._state.holds(slot, state):
                self._state.append(launched.index[[row]], [chosen[row]])
        return SampleResult(token_ids=chosen, logprobs=_logprobs(launched, errors), errors=errors)


def _logprobs(launched: _Launched, errors: Mapping[int, str]) -> tuple[TokenLogprobs | None, ...]:
    entries: list[TokenLogprobs | None] = [None] * len(launched.index)
    for rows, measured in launched.measured:
        for row, entry in zip(rows.tolist(), measured.entries(), strict=True):
            entries[row] = None if row in errors else entry
    return tuple(entries)


def _chunks(rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    return (rows[first : first + CHUNK] for first in range(0, len(rows), CHUNK))


def _to_host(values: Tensor) -> Tensor:
    """The tensor on the host, whose values arrive behind the work that the device has now."""
    if values.device.type != "cuda":
        return values
    arrived = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return arrived.copy_(values, non_blocking=True)


def _arrival(device: torch.device) -> Callable[[], None]:
    """What waits until all that was sent to the host has arrived there."""
    if device.type != "cuda":
        return lambda: None
    new_event: Any = torch.cuda.Event
    event = new_event()
    event.record()
    wait: Callable[[], None] = event.synchronize
    return wait
