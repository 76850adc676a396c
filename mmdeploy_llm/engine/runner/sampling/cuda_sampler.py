"""CudaSampler: a Sampler whose rules and draws are kernels, so that the next step can start from
its tokens before the host has them.

logits [N, V] --> what needs the host: logits processors, grammar, n-grams, longer bad words
              --> all other rules, the draw, the state of each slot: kernels/cuda/choose.py
              --> token ids and log-probabilities on the device, their copies to the host launched
    finish    --> waits for the copies: errors, entries, trackers
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdeploy_llm.kernels.cuda import choose as kernels
from mmdeploy_llm.layers.transfer import to_device
from mmdeploy_llm.values.outputs.request_output import TokenLogprobs

from .grammar import GrammarBackend
from .logprobs import Measured, measure
from .processors import LogitsProcessors
from .results import NOT_FINITE, NOTHING_ALLOWED, Certainty, PendingSample, SampleResult
from .sampler import Sampler
from .state import NO_LOGPROBS, SlotRequest, SlotState
from .tables import SlotTables
from .unmet import why_nothing

CHUNK = 32  # rows whose log-probabilities are computed at once, to bound temporaries
MESSAGES = {kernels.NOT_FINITE: NOT_FINITE, kernels.NOTHING_ALLOWED: NOTHING_ALLOWED}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """A launch whose results are on the host once `wait` has returned.

    index: [N] slots.
    token_ids: [2, N] token ids and their outcomes, see kernels/cuda/choose.py.
    tracked: see SamplingState.
    logprobs: rows and their log-probabilities.
    failures: row -> why its logits processor failed.
    certain: see Sampler; None where no request asks.
    """

    index: NDArray[np.int64]
    token_ids: Tensor
    wait: Callable[[], None]
    tracked: Mapping[int, SlotState]
    logprobs: Sequence[tuple[NDArray[np.int64], Measured]]
    failures: Mapping[int, str]
    certain: Certainty | None


class CudaSampler(Sampler):
    """Samples on the device. Its tokens are those of Sampler, up to the rounding of the device's
    arithmetic."""

    can_overlap = True

    def __init__(
        self,
        *,
        max_num_slots: int,
        vocab_size: int,
        device: torch.device,
        grammars: GrammarBackend | None = None,
        processors: LogitsProcessors | None = None,
        tiling: kernels.Tiling | None = None,
    ) -> None:
        super().__init__(
            max_num_slots=max_num_slots,
            vocab_size=vocab_size,
            device=device,
            grammars=grammars,
            processors=processors,
        )
        self._device = device
        self._tiling = tiling
        self._tables = SlotTables(max_num_slots, vocab_size, device)

    def add(self, slot: int, request: SlotRequest) -> None:
        """Puts a request into a free slot, on the host and on the device; see Sampler."""
        super().add(slot, request)
        state = self._state[slot]
        is_random = bool(self._state.is_random[slot])
        self._tables.add(slot, self._state.numbers(slot), state, is_random=is_random)
        if not state.needs_host:
            self._state.move_to_device(slot)

    def needs_host(self, slots: Sequence[int] | NDArray[np.int64]) -> bool:
        """Whether a tracker on the host must receive the last tokens of `slots` first."""
        return bool(self._state.tracked(np.asarray(slots, dtype=np.int64)))

    @torch.inference_mode()
    def launch(
        self,
        logits: Tensor,
        slots: Sequence[int] | NDArray[np.int64] | Tensor,
        *,
        largest: tuple[Tensor, Tensor] | None = None,
    ) -> PendingSample:
        """Launches the choice of the next tokens; see Sampler. Does not wait for the device; work
        that is launched later may overwrite the logits."""
        index = np.asarray(slots, dtype=np.int64)
        assert logits.shape == (len(index), self._vocab_size), f"logits are {tuple(logits.shape)}"
        out, failures = self._choose_on_device(logits, index, largest)
        self._tables.advance(index)
        logprobs = [*self._logprobs_on_device(logits, index, out[0])]
        certain = self._certain(logits, index, out[0])
        launch = _Launch(
            index=index,
            token_ids=_to_host(out),
            tracked=self._state.tracked(index),
            logprobs=[(rows, one.each(_to_host)) for rows, one in logprobs],
            failures=failures,
            certain=None
            if certain is None
            else replace(certain, is_certain=_to_host(certain.is_certain)),
            wait=_copies_done(self._device),
        )
        return PendingSample(token_ids=out[0], finish=lambda: self._finish(launch))

    def _choose_on_device(
        self,
        logits: Tensor,
        index: NDArray[np.int64],
        largest: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Mapping[int, str]]:
        """Returns token ids and their outcomes, [2, N] int64, and row -> why its logits processor
        failed."""
        forced = self._state.forced(index)
        is_random = self._state.is_random[index]
        is_plain = not (is_random.any() or forced or self._tables.has_rules(index).any())
        adjusted, failures = self._adjusted(logits, index, list(forced))
        if is_plain and largest is not None and adjusted is logits:
            token_ids, peaks = largest
            has_failed = (peaks.abs() < torch.inf).logical_not()  # fewer launches than isfinite
            return torch.stack([token_ids.masked_fill(has_failed, 0), has_failed]), {}
        forced_ids = None
        if forced:
            ids = np.full(len(index), -1)
            ids[list(forced)] = list(forced.values())
            forced_ids = to_device(ids, self._device)
        chosen = kernels.choose(
            adjusted,
            to_device(index, self._device),
            self._tables.rules(),
            weighs=self._state.is_mixed(index[is_random]),
            forced=forced_ids,
            tiling=self._tiling,
        )
        return chosen, failures

    def _logprobs_on_device(
        self, logits: Tensor, index: NDArray[np.int64], token_ids: Tensor
    ) -> Iterator[tuple[NDArray[np.int64], Measured]]:
        """Yields rows and their requested log-probabilities, grouped by the number of
        candidates."""
        wanted = self._state.num_logprobs[index]
        for k in np.unique(wanted[wanted != NO_LOGPROBS]).tolist():
            for rows in _chunks(np.flatnonzero(wanted == k)):
                index_on_device = to_device(rows, self._device)
                own, ids = (x.index_select(0, index_on_device) for x in (logits, token_ids))
                yield rows, measure(own, ids, k)

    def _adjusted(
        self, logits: Tensor, index: NDArray[np.int64], forced: Sequence[int]
    ) -> tuple[Tensor, Mapping[int, str]]:
        """Returns the logits after the rules that need the host, and row -> why its logits
        processor failed."""
        is_adjusted = self._state.needs_transforms(index)
        is_adjusted[forced] = False
        rows = np.flatnonzero(is_adjusted)
        if not len(rows):
            return logits, {}
        rows_on_device = to_device(rows, self._device)
        own = logits.index_select(0, rows_on_device).float()
        found = self._adjust(own, index[rows])
        failures = {int(rows[row]): reason for row, reason in found.items()}
        return logits.float().index_copy(0, rows_on_device, own), failures

    def _finish(self, launch: _Launch) -> SampleResult:
        launch.wait()
        chosen, outcomes = launch.token_ids.tolist()
        errors = {row: MESSAGES[code] for row, code in enumerate(outcomes) if code != kernels.OK}
        for row, reason in launch.failures.items():
            if errors.get(row) != NOT_FINITE:
                errors[row], chosen[row] = reason, 0
        unmet = [row for row, reason in errors.items() if reason == NOTHING_ALLOWED]
        for row in unmet:
            errors[row] = why_nothing(launch.tracked.get(row), self._vocab_size)
        for row, state in launch.tracked.items():
            slot = launch.index[row]
            if row not in errors and self._state.holds(slot, state):
                self._state.append(launch.index[[row]], [chosen[row]])
        return SampleResult(
            token_ids=chosen,
            logprobs=_entries(launch, errors),
            errors=errors,
            unmet=unmet,
            certain=() if launch.certain is None else launch.certain.rows_in(errors),
        )


def _entries(launch: _Launch, errors: Mapping[int, str]) -> tuple[TokenLogprobs | None, ...]:
    """Returns [N] log-probabilities, None for rows that failed or requested none."""
    entries: list[TokenLogprobs | None] = [None] * len(launch.index)
    for rows, measured in launch.logprobs:
        for row, entry in zip(rows.tolist(), measured.entries(), strict=True):
            entries[row] = None if row in errors else entry
    return tuple(entries)


def _chunks(rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    return (rows[first : first + CHUNK] for first in range(0, len(rows), CHUNK))


def _to_host(values: Tensor) -> Tensor:
    """Returns a host tensor into which the values are copied after the device's work so far. It is
    valid once the function returned by `_copies_done` has been called."""
    if values.device.type != "cuda":
        return values
    copied = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return copied.copy_(values, non_blocking=True)


def _copies_done(device: torch.device) -> Callable[[], None]:
    """Returns a function that waits for all copies to the host that were launched before."""
    if device.type != "cuda":
        return lambda: None
    new_event: Any = torch.cuda.Event
    event = new_event()
    event.record()
    wait: Callable[[], None] = event.synchronize
    return wait
