"""StepStates: the states of the layers of a model that keep one, and which rows a step reads and
writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from mmdeploy_llm.layers.attention.cache_memory import KVCacheShape, allocate_states
from mmdeploy_llm.layers.transfer import to_device_together
from mmdeploy_llm.values.plan import PADDING_ROW, ZERO_ROW, ScheduledTokens


class Places:
    """The place of each row's matrix, of as many places as rows. The runner is its only user."""

    def __init__(self, num_rows: int) -> None:
        self._free = list(range(num_rows - 1, PADDING_ROW, -1))  # a stack: low ones first
        self._place_of = {ZERO_ROW: ZERO_ROW, PADDING_ROW: PADDING_ROW}
        self._num_users = [0] * num_rows  # rows at a place
        self._is_own = [False] * num_rows  # whether only the next step of a sequence reads a row

    def move(self, read: int, write: int, num_tokens: int) -> tuple[int, int]:
        """Returns where a step of a sequence finds its matrix and where it writes the next. What
        row `write` had before is forgotten. May be called again for a step that failed."""
        source = self._place_of.get(read, ZERO_ROW)
        if write == PADDING_ROW:
            return source, PADDING_ROW
        self._leave(write)
        is_in_place = num_tokens == 1 and self._is_own[read]
        target = source if is_in_place else self._free.pop()
        self._place_of[write] = target
        self._num_users[target] += 1
        self._is_own[write] = num_tokens == 1
        return source, target

    def _leave(self, row: int) -> None:
        place = self._place_of.pop(row, None)
        if place is None:
            return
        self._num_users[place] -= 1
        if not self._num_users[place]:
            self._free.append(place)


PADDING = (0, 1)  # a row of padding reads the zeros and writes a row that nobody reads


class StepStates:
    """A forward.StateContext over the tensors of a StateTable."""

    def __init__(
        self,
        rows: Sequence[Tensor],
        query_lens: tuple[int, ...],
        by_layer: Mapping[int, tuple[Tensor, ...]],
    ) -> None:
        self.read, self.write, self.source, self.target = rows
        self.rows, self.query_lens = rows, query_lens
        self.starts = torch.tensor((0, *accumulate(query_lens)))
        is_long = [count > 1 for count in query_lens]
        self.num_decode = is_long.index(True) if any(is_long) else len(query_lens)
        self._by_layer = by_layer

    def tensors(self, layer: int) -> tuple[Tensor, ...]:
        """See forward.StateContext."""
        return self._by_layer[layer]


class StateTable:
    """The states of all layers and rows. The runner is its only user; the layers of the model write
    the tensors."""

    def __init__(self, shape: KVCacheShape, num_rows: int, device: torch.device) -> None:
        self._by_layer = allocate_states(shape, num_rows, device)
        self._device = device
        self._places = Places(num_rows) if device.type == "cpu" else None
        self._decodes: dict[int, StepStates] = {}  # by number of sequences

    def step(self, scheduled: Sequence[ScheduledTokens]) -> StepStates:
        """Returns the states of a step. Those of decode steps with the same number of sequences
        keep their addresses."""
        counts = tuple(item.num_tokens for item in scheduled)
        if max(counts) == 1:
            return self.decode(len(scheduled), scheduled)
        return StepStates(self._rows(scheduled, 0), counts, self._by_layer)

    def decode(self, num_rows: int, scheduled: Sequence[ScheduledTokens]) -> StepStates:
        """Returns the states of a decode step of num_rows sequences, those after the scheduled ones
        being padding. Tensors keep their addresses."""
        rows = self._rows(scheduled, num_rows - len(scheduled))
        states = self._decodes.get(num_rows)
        if states is None:
            own = [x.clone() for x in rows]
            states = self._decodes[num_rows] = StepStates(own, (1,) * num_rows, self._by_layer)
        for own_rows, given in zip(states.rows, rows, strict=True):
            own_rows.copy_(given)
        return states

    def _rows(self, scheduled: Sequence[ScheduledTokens], num_padding: int) -> tuple[Tensor, ...]:
        """Returns the rows that the items read, and those that they write, and their places. Items
        of a warm-up have no rows of their own."""
        rows = [PADDING if item.state_rows is None else item.state_rows for item in scheduled]
        rows += [PADDING] * num_padding
        places = rows  # kernels of other devices change nothing in place
        if self._places is not None:
            counts = [item.num_tokens for item in scheduled] + [1] * num_padding
            places = [self._places.move(*own, n) for own, n in zip(rows, counts, strict=True)]
        columns = np.ascontiguousarray(np.hstack([rows, places]).T, dtype=np.int64)
        return tuple(to_device_together(tuple(columns), self._device))
