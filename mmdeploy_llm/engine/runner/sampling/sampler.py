"""Sampler: chooses the next token of every request of a batch.

logits [N, V] --> logits processors of plugins                               processors.py
              --> bias, grammar, min_tokens, bad words, n-grams, penalties   adjust.py
              --> greedy: lowest index of the largest logit                  largest.py
                  random: temperature, min_p, top_k, top_p, one uniform      draw.py
              --> end of thinking: the forced token instead                  trackers.py
              --> requested log-probabilities, of the unchanged logits       logprobs.py
              --> the state records the tokens                               state.py

A batch of greedy requests without rules costs one pass over the logits and no copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdeploy_llm.kernels import TORCH, Kernels
from mmdeploy_llm.layers.transfer import to_device
from mmdeploy_llm.values.outputs.request_output import TokenLogprobs

from .adjust import adjust
from .draw import draw, take_rows
from .grammar import GrammarBackend
from .largest import first_argmax
from .logprobs import are_certain, logprobs_of
from .processors import LogitsProcessors, process
from .results import NOT_FINITE, Certainty, Choice, PendingSample, SampleResult
from .state import NO_LOGPROBS, SamplingState, SlotRequest
from .unmet import why_nothing


class Sampler:
    """Samples for up to `max_num_slots` requests, on the host. The runner owns it and is its only
    caller.

    The token of a request depends on its own logits, params and tokens only: neither the batch nor
    the slot nor a preemption changes it.

    can_overlap: whether `launch` returns before the device has computed the tokens.
    """

    can_overlap = False

    def __init__(
        self,
        *,
        max_num_slots: int,
        vocab_size: int,
        device: torch.device,
        grammars: GrammarBackend | None = None,
        processors: LogitsProcessors | None = None,
        kernels: Kernels = TORCH,
    ) -> None:
        """kernels: without compiled ones the same tokens take longer."""
        self._kernels = kernels
        self._vocab_size = vocab_size
        self._work = torch.empty(0, vocab_size, device=device)
        self._state = SamplingState(max_num_slots, vocab_size, grammars, processors)

    @property
    def vocab_size(self) -> int:
        """Number of values in a row of logits."""
        return self._vocab_size

    def add(self, slot: int, request: SlotRequest) -> None:
        """Puts a request into a free slot. Raises RequestError when its grammar is not valid,
        PluginError when a logits processor fails."""
        self._state.add(slot, request)

    def remove(self, slot: int) -> None:
        """Frees a slot; does nothing if it is free."""
        self._state.remove(slot)

    def needs_host(self, slots: Sequence[int] | NDArray[np.int64]) -> bool:
        """Whether the next tokens of `slots` can be launched only once the last ones are finished,
        because the host must know these first."""
        return True

    def sample(
        self,
        logits: Tensor,
        slots: Sequence[int] | NDArray[np.int64] | Tensor,
        *,
        largest: tuple[Tensor, Tensor] | None = None,
    ) -> SampleResult:
        """Launches the choice of the next tokens and waits for it; see `launch`."""
        return self.launch(logits, slots, largest=largest).finish()

    @torch.inference_mode()
    def launch(
        self,
        logits: Tensor,
        slots: Sequence[int] | NDArray[np.int64] | Tensor,
        *,
        largest: tuple[Tensor, Tensor] | None = None,
    ) -> PendingSample:
        """Chooses the next token of the request in each of `slots` [N], from logits [N, V] of any
        float dtype, which are not changed. largest: first_argmax of the logits, where it is known.

        The state records the tokens, so that the next call samples the tokens after them; a failed
        row leaves its state unchanged, and a call that raises leaves all of them unchanged.
        """
        result = self._sampled(logits, slots, largest)
        return PendingSample(finish=lambda: result)

    def _sampled(
        self,
        logits: Tensor,
        slots: Sequence[int] | NDArray[np.int64] | Tensor,
        largest: tuple[Tensor, Tensor] | None,
    ) -> SampleResult:
        index = np.asarray(slots, dtype=np.int64)
        assert logits.shape == (len(index), self._vocab_size), f"logits are {tuple(logits.shape)}"
        forced = self._state.forced(index)
        choice = self._choose(logits, index, list(forced), largest)
        # Token ids and outcomes are transferred to the host together.
        outcomes = torch.stack([choice.token_ids, choice.is_finite, choice.is_allowed])
        chosen, finite, allowed = outcomes.tolist()
        infinite = {row: NOT_FINITE for row, is_ok in enumerate(finite) if not is_ok}
        errors = {**choice.failures, **infinite}
        unmet = [row for row, is_ok in enumerate(allowed) if not is_ok and row not in errors]
        errors |= {row: why_nothing(self._state[index[row]], self._vocab_size) for row in unmet}
        for row, token_id in forced.items():
            chosen[row] = token_id
        for row in errors:
            chosen[row] = 0
        logprobs = self._logprobs(logits, index, chosen, errors)
        certain = self._certain(logits, index, chosen)
        self._advance(index, chosen, errors)
        sure = () if certain is None else certain.rows_in(errors)
        return SampleResult(
            token_ids=chosen, logprobs=logprobs, errors=errors, unmet=unmet, certain=sure
        )

    def _choose(
        self,
        logits: Tensor,
        index: NDArray[np.int64],
        forced: Sequence[int],
        largest: tuple[Tensor, Tensor] | None,
    ) -> Choice:
        """Chooses a token for each row. forced: rows whose token is known."""
        token_ids, peaks = largest or first_argmax(logits, self._kernels)
        is_finite = peaks.isfinite()
        is_allowed = torch.ones_like(is_finite)
        failures: dict[int, str] = {}
        is_random = self._state.is_random[index]
        is_adjusted = self._state.needs_transforms(index)
        is_random[forced] = is_adjusted[forced] = False
        rows = np.flatnonzero(is_adjusted)
        if len(rows):
            found = self._choose_adjusted(logits, index[rows], rows)
            token_ids[rows], is_allowed[rows] = found.token_ids, found.is_allowed
            failures = {int(rows[row]): reason for row, reason in found.failures.items()}
        rows = np.flatnonzero(is_random & ~is_adjusted)
        if len(rows):
            params = self._state.draw_params(index[rows])
            token_ids[rows] = draw(take_rows(logits, rows), params, self._kernels)
        return Choice(
            token_ids=token_ids, is_finite=is_finite, is_allowed=is_allowed, failures=failures
        )

    def _choose_adjusted(
        self, logits: Tensor, index: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> Choice:
        """Chooses the tokens of some rows, whose slots are `index`, by all rules."""
        work = self._work_rows(len(rows))
        work.copy_(take_rows(logits, rows))
        failures = self._adjust(work, index)
        token_ids, peaks = first_argmax(work, self._kernels)
        random = np.flatnonzero(self._state.is_random[index])
        if len(random):
            params = self._state.draw_params(index[random])
            token_ids[random] = draw(take_rows(work, random), params, self._kernels)
        return Choice(
            token_ids=token_ids,
            is_finite=peaks.isfinite(),
            is_allowed=peaks > -torch.inf,
            failures=failures,
        )

    def _adjust(self, logits: Tensor, index: NDArray[np.int64]) -> dict[int, str]:
        """Applies logits processors and rules to float32 rows [R, V] of the slots `index`, in
        place; returns row -> why a processor failed."""
        states = [self._state[slot] for slot in index.tolist()]
        used = [state.processors for state in states]
        failures = process(logits, used) if any(used) else {}
        adjust(logits, states, self._state.bans_stops(index))
        return failures

    def _work_rows(self, num_rows: int) -> Tensor:
        """Returns a float32 buffer of rows, kept between steps: allocating it would take longer
        than the rules."""
        if len(self._work) < num_rows:
            capacity = max(num_rows, 2 * len(self._work))
            self._work = self._work.new_empty(capacity, self._vocab_size)
        return self._work[:num_rows]

    def _logprobs(
        self,
        logits: Tensor,
        index: NDArray[np.int64],
        chosen: Sequence[int],
        errors: Mapping[int, str],
    ) -> tuple[TokenLogprobs | None, ...]:
        wanted = self._state.num_logprobs[index]
        wanted[list(errors)] = NO_LOGPROBS
        rows = np.flatnonzero(wanted != NO_LOGPROBS)
        if not len(rows):
            return (None,) * len(index)
        return logprobs_of(take_rows(logits, rows), rows, chosen, wanted)

    def _certain(
        self, logits: Tensor, index: NDArray[np.int64], token_ids: Tensor | Sequence[int]
    ) -> Certainty | None:
        """Returns which of the tokens [N] are nearly certain; None where no request asks."""
        if not self._state.has_early_stops:
            return None
        thresholds = self._state.certainty[index]
        rows = np.flatnonzero(thresholds < np.inf)
        if not len(rows):
            return None
        limits = to_device(thresholds[rows], logits.device)
        ids, own = torch.as_tensor(token_ids, device=logits.device), logits
        if len(rows) < len(index):
            chosen = to_device(rows, logits.device)
            ids, own = ids.index_select(0, chosen), own.index_select(0, chosen)
        return Certainty(rows=rows, is_certain=are_certain(own, ids, limits))

    def _advance(
        self, index: NDArray[np.int64], chosen: Sequence[int], errors: Mapping[int, str]
    ) -> None:
        if not errors:
            self._state.append(index, chosen)
            return
        good = [row for row in range(len(index)) if row not in errors]
        self._state.append(index[good], [chosen[row] for row in good])
