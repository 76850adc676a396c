"""SlotTables: the state of each slot on the device, for the CUDA kernels: numbers, and the rules
that do not need the host.

A request's rows are written when it starts, or starts again after a preemption; from then on the
kernels count its tokens. Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from mmdeploy_llm.kernels.cuda import choose_kernels as columns
from mmdeploy_llm.kernels.cuda.choose import Rules
from mmdeploy_llm.layers.transfer import to_device, to_device_together

from .draw import min_p_cutoff
from .state import HUGE, TINY, SlotNumbers, SlotState, resolved

FIRST_EDITS = 16  # capacity of a slot for biases and bans; doubled when a request has more


class SlotTables:
    """Tables with a row for each of `max_num_slots` slots. CudaSampler is its only user."""

    def __init__(self, max_num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._ints = np.zeros((max_num_slots, int(columns.NUM_INTS)), dtype=np.int64)
        self._reals = np.zeros((max_num_slots, int(columns.NUM_REALS)))
        self._edit_ids = np.zeros((max_num_slots, FIRST_EDITS), dtype=np.int32)
        self._edit_values = np.zeros((max_num_slots, FIRST_EDITS), dtype=np.float32)
        self._changed: set[int] = set()
        self._rules = Rules(
            ints=to_device(self._ints.copy(), device),
            reals=to_device(self._reals.copy(), device),
            edit_ids=to_device(self._edit_ids.copy(), device),
            edit_values=to_device(self._edit_values.copy(), device),
            counts=torch.zeros(1, dtype=torch.int16, device=device),
        )

    def has_rules(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns [N]: whether the kernels change the next logits of the slots or count their
        tokens."""
        rows = self._ints[slots]
        bans_stops = rows[:, int(columns.NUM_OUTPUTS)] < rows[:, int(columns.MIN_OUTPUTS)]
        last = np.where(bans_stops, int(columns.NUM_ALL_EDITS), int(columns.NUM_EDITS))
        has_edits = np.take_along_axis(rows, last[:, None], 1)[:, 0] > 0
        return has_edits | (rows[:, int(columns.HAS_COUNTS)] > 0)

    def advance(self, slots: NDArray[np.int64]) -> None:
        """Counts a launched token for each of the slots, which are all different. The kernels count
        in the device's rows themselves, so that no row is copied."""
        self._ints[slots, int(columns.NUM_OUTPUTS)] += 1

    def add(self, slot: int, numbers: SlotNumbers, state: SlotState, *, is_random: bool) -> None:
        """Writes the rows of a slot. If a rule needs the host, all rules stay on the host."""
        draw, params = numbers.draw, state.params
        ints, reals = self._ints[slot], self._reals[slot]
        ints[:] = 0
        ints[columns.SEED] = numbers.first_state.view(np.int64)[0]
        ints[columns.NUM_OUTPUTS] = numbers.num_outputs
        ints[columns.TOP_K] = draw.top_k[0]
        ints[columns.IS_RANDOM] = is_random
        if not state.needs_host:
            ints[columns.MIN_OUTPUTS] = numbers.stops_from
            self._write_edits(slot, state)
            ints[columns.HAS_COUNTS] = self._write_counts(slot, state)
        reals[columns.TEMPERATURE] = draw.temperature[0]
        reals[columns.LEAST] = min_p_cutoff(draw)[0]
        reals[columns.TOP_P] = draw.top_p[0]
        reals[columns.REPETITION] = np.clip(resolved(params.repetition_penalty), TINY, HUGE)
        reals[columns.FREQUENCY] = resolved(params.frequency_penalty)
        reals[columns.PRESENCE] = resolved(params.presence_penalty)
        self._changed.add(slot)

    def rules(self) -> Rules:
        """Returns the rules after copying all changes to the device, ordered in its stream."""
        if self._changed:
            rows, rules = np.array(sorted(self._changed)), self._rules
            on_host = self._ints, self._reals, self._edit_ids, self._edit_values
            on_device = rules.ints, rules.reals, rules.edit_ids, rules.edit_values
            arrays = [rows, *(table[rows] for table in on_host)]
            index, *values = to_device_together(arrays, self._device)
            for table, changed in zip(on_device, values, strict=True):
                table.index_copy_(0, index, changed)
            self._changed.clear()
        return self._rules

    def _write_edits(self, slot: int, state: SlotState) -> None:
        """Writes a slot's biases, then its bans, then the bans of stop tokens."""
        banned = np.concatenate([state.banned_ids, state.stop_ids])
        ids = np.concatenate([state.bias_ids, banned])
        self._reserve_edits(len(ids))
        self._edit_ids[slot, : len(ids)] = ids
        self._edit_values[slot, : len(ids)] = -np.inf
        self._edit_values[slot, : len(state.bias_ids)] = state.bias_values
        self._ints[slot, columns.NUM_EDITS] = len(ids) - len(state.stop_ids)
        self._ints[slot, columns.NUM_ALL_EDITS] = len(ids)

    def _reserve_edits(self, num_edits: int) -> None:
        capacity = self._edit_ids.shape[1]
        if num_edits <= capacity:
            return
        extra = max(capacity, num_edits - capacity)
        self._edit_ids = np.pad(self._edit_ids, ((0, 0), (0, extra)))
        self._edit_values = np.pad(self._edit_values, ((0, 0), (0, extra)))
        self._rules = replace(
            self._rules,
            edit_ids=to_device(self._edit_ids.copy(), self._device),
            edit_values=to_device(self._edit_values.copy(), self._device),
        )

    def _write_counts(self, slot: int, state: SlotState) -> bool:
        """Writes the token counts of a request with penalties; returns whether it has any."""
        if state.counts is None:
            return False
        if self._rules.counts.dim() == 1:
            shape = len(self._ints), self._vocab_size
            counts = torch.zeros(shape, dtype=torch.int16, device=self._device)
            self._rules = replace(self._rules, counts=counts)
        values = np.minimum(state.counts.counts + 1, int(columns.MAX_COUNT)).astype(np.int16)
        row = self._rules.counts[slot].zero_()
        if len(values):
            ids, counts = to_device_together([state.counts.ids, values], self._device)
            row.index_copy_(0, ids, counts)
        return True
