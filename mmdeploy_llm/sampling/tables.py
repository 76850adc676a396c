"""What the kernels know of each slot, on the device: numbers, and the rules that need no host.

A request's rows are written when it starts, or starts again; from then on the kernels count its
tokens. Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from mmdeploy_llm.cuda import choose_kernels as columns
from mmdeploy_llm.cuda.choose import Rules

from .draw import least
from .state import HUGE, TINY, SlotNumbers, SlotState, resolved
from .upload import upload, upload_all

FIRST_EDITS = 16  # that a slot has room for; doubled when one has more


class SlotTables:
    """Rows of up to `max_num_slots` slots. The DeviceSampler is its only user."""

    def __init__(self, max_num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._ints = np.zeros((max_num_slots, int(columns.NUM_INTS)), dtype=np.int64)
        self._reals = np.zeros((max_num_slots, int(columns.NUM_REALS)))
        self._edit_ids = np.zeros((max_num_slots, FIRST_EDITS), dtype=np.int32)
        self._edit_values = np.zeros((max_num_slots, FIRST_EDITS), dtype=np.float32)
        self._changed: set[int] = set()
        self._rules = Rules(
            ints=upload(self._ints.copy(), device),
            reals=upload(self._reals.copy(), device),
            edit_ids=upload(self._edit_ids.copy(), device),
            edit_values=upload(self._edit_values.copy(), device),
            counts=torch.zeros(1, dtype=torch.int16, device=device),
        )

    def has_rules(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[N]: whether the kernels change the next logits or count the tokens of the slots."""
        rows = self._ints[slots]
        is_held = rows[:, int(columns.NUM_OUTPUTS)] < rows[:, int(columns.MIN_OUTPUTS)]
        last = np.where(is_held, int(columns.NUM_ALL_EDITS), int(columns.NUM_EDITS))
        has_edits = np.take_along_axis(rows, last[:, None], 1)[:, 0] > 0
        return has_edits | (rows[:, int(columns.HAS_COUNTS)] > 0)

    def advance(self, slots: NDArray[np.int64]) -> None:
        """The slots, all different, will have taken a token each; their rows are not sent again."""
        self._ints[slots, int(columns.NUM_OUTPUTS)] += 1

    def add(self, slot: int, numbers: SlotNumbers, state: SlotState, *, is_random: bool) -> None:
        """Writes the rows of a slot; the rules of a request that needs the host stay there."""
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
        reals[columns.LEAST] = least(draw)[0]
        reals[columns.TOP_P] = draw.top_p[0]
        reals[columns.REPETITION] = np.clip(resolved(params.repetition_penalty), TINY, HUGE)
        reals[columns.FREQUENCY] = resolved(params.frequency_penalty)
        reals[columns.PRESENCE] = resolved(params.presence_penalty)
        self._changed.add(slot)

    def rules(self) -> Rules:
        """With all changes on the device, in the order of its stream."""
        if self._changed:
            rows, rules = np.array(sorted(self._changed)), self._rules
            mine = self._ints, self._reals, self._edit_ids, self._edit_values
            theirs = rules.ints, rules.reals, rules.edit_ids, rules.edit_values
            index, *values = upload_all([rows, *(table[rows] for table in mine)], self._device)
            for table, changed in zip(theirs, values, strict=True):
                table.index_copy_(0, index, changed)
            self._changed.clear()
        return self._rules

    def _write_edits(self, slot: int, state: SlotState) -> None:
        """Biases, then bans, then the bans of what would stop the request."""
        banned = np.concatenate([state.banned_ids, state.stop_ids])
        ids = np.concatenate([state.bias_ids, banned])
        self._make_room(len(ids))
        self._edit_ids[slot, : len(ids)] = ids
        self._edit_values[slot, : len(ids)] = -np.inf
        self._edit_values[slot, : len(state.bias_ids)] = state.bias_values
        self._ints[slot, columns.NUM_EDITS] = len(ids) - len(state.stop_ids)
        self._ints[slot, columns.NUM_ALL_EDITS] = len(ids)

    def _make_room(self, num_edits: int) -> None:
        room = self._edit_ids.shape[1]
        if num_edits <= room:
            return
        extra = max(room, num_edits - room)
        self._edit_ids = np.pad(self._edit_ids, ((0, 0), (0, extra)))
        self._edit_values = np.pad(self._edit_values, ((0, 0), (0, extra)))
        self._rules = replace(
            self._rules,
            edit_ids=upload(self._edit_ids.copy(), self._device),
            edit_values=upload(self._edit_values.copy(), self._device),
        )

    def _write_counts(self, slot: int, state: SlotState) -> bool:
        """Whether the request has penalties."""
        if state.counts is None:
            return False
        if self._rules.counts.dim() == 1:
            shape = len(self._ints), self._vocab_size
            counts = torch.zeros(shape, dtype=torch.int16, device=self._device)
            self._rules = replace(self._rules, counts=counts)
        values = np.minimum(state.counts.counts + 1, int(columns.MAX_COUNT)).astype(np.int16)
        row = self._rules.counts[slot].zero_()
        if len(values):
            ids, counts = upload_all([state.counts.ids, values], self._device)
            row.index_copy_(0, ids, counts)
        return True
