"""Slots: the state of running requests in the runner, in arrays over slots, so that a step is
prepared without a loop over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmdeploy_llm.request import MediaSpan
from mmdeploy_llm.values.plan import NewRequest, ScheduledTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotInfo:
    """The values that do not change while a request is in its slot.

    positions: M-RoPE positions of the prompt, [axes, prompt_len]; None: token i has position i.
    """

    index: int
    request: NewRequest
    positions: NDArray[np.int64] | None

    @property
    def media(self) -> tuple[MediaSpan, ...]:
        """The request's media, in prompt order."""
        return self.request.media

    def media_in(self, item: ScheduledTokens) -> tuple[MediaSpan, ...]:
        """Returns the media that overlap the tokens of a scheduled item."""
        stop = item.start + item.num_tokens
        return tuple(span for span in self.media if span.offset < stop and item.start < span.end)


class BlockTables:
    """The block table of each slot, [slots, max_blocks] int32, filled from the left."""

    def __init__(self, num_slots: int, num_blocks: int) -> None:
        self.ids = np.zeros((num_slots, num_blocks), dtype=np.int32)
        self._counts = np.zeros(num_slots, dtype=np.int64)

    def clear(self, index: int) -> None:
        """Empties the table of a slot."""
        self._counts[index] = 0

    def extend(self, index: int, block_ids: Sequence[int]) -> None:
        """Appends blocks to the table of a slot."""
        begin = self._counts[index]
        self._counts[index] = end = begin + len(block_ids)
        self.ids[index, begin:end] = block_ids


class Slots:
    """Token ids, block tables and position offsets of up to `num_slots` requests. The runner is
    its only writer.

    token_ids: [slots, max_model_len + 1].
    tables: block tables of the layers without a window, then of those with one, if there are any.
    prompt_lens: [slots].
    deltas: [slots]; a generated token i has M-RoPE position i + delta on all axes.
    is_long: [slots], see forward.ForwardInputs; None for a model without `long_after`.
    num_wanting: requests that want no text. num_watched: those with heads.
    """

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        *,
        has_windows: bool = False,
        long_after: int | None = None,
    ) -> None:
        self.token_ids = np.zeros((num_slots, max_model_len + 1), dtype=np.int64)
        num_blocks = -(-max_model_len // block_size)
        self.tables = tuple(BlockTables(num_slots, num_blocks) for _ in range(1 + has_windows))
        self.prompt_lens = np.zeros(num_slots, dtype=np.int64)
        self.deltas = np.zeros(num_slots, dtype=np.int64)
        self.is_long = None if long_after is None else np.zeros(num_slots, dtype=np.bool_)
        self._long_after = long_after
        self.num_wanting = self.num_watched = 0
        self._free = list(range(num_slots - 1, -1, -1))
        self._infos: dict[str, SlotInfo] = {}

    def __getitem__(self, request_id: str) -> SlotInfo:
        return self._infos[request_id]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._infos

    def __len__(self) -> int:
        return len(self._infos)

    def add(self, request: NewRequest, positions: NDArray[np.int64] | None) -> SlotInfo:
        """Puts the request into a free slot, which exists: the scheduler keeps to max_num_seqs."""
        index = self._free.pop()
        self.token_ids[index, : len(request.token_ids)] = request.token_ids
        self.prompt_lens[index] = request.prompt_len
        # As in transformers' generate: positions continue from the last token of the prompt, even
        # where a long video before it reaches further in time.
        last = request.prompt_len - 1 if positions is None else positions[:, -1].max()
        self.deltas[index] = last + 1 - request.prompt_len
        if self.is_long is not None and self._long_after is not None:
            self.is_long[index] = len(request.token_ids) > self._long_after
        for tables in self.tables:
            tables.clear(index)
        info = SlotInfo(index=index, request=request, positions=positions)
        self._infos[request.request_id] = info
        self.num_wanting += request.wanted is not None
        self.num_watched += bool(request.heads)
        return info

    def drop(self, request_id: str) -> int | None:
        """Frees the request's slot and returns its index; None for a request without one."""
        info = self._infos.pop(request_id, None)
        if info is None:
            return None
        self._free.append(info.index)
        self.num_wanting -= info.request.wanted is not None
        self.num_watched -= bool(info.request.heads)
        return info.index

    def extend_tables(self, scheduled: Sequence[ScheduledTokens]) -> None:
        """Appends the step's new blocks to their requests' block tables."""
        for item in scheduled:
            index = self._infos[item.request_id].index
            self.tables[0].extend(index, item.new_block_ids)
            if len(self.tables) > 1:
                self.tables[1].extend(index, item.new_window_ids)

    def write_drafts(self, scheduled: Sequence[ScheduledTokens]) -> None:
        """Writes the step's drafts after the known tokens of their requests; any token for one that
        is UNKNOWN."""
        for item in scheduled:
            end = item.start + item.num_tokens
            own = self.token_ids[self._infos[item.request_id].index]
            own[end - len(item.drafts) : end] = [max(0, token_id) for token_id in item.drafts]

    def append(
        self, indices: NDArray[np.int64], ends: NDArray[np.int64], token_ids: Sequence[int]
    ) -> None:
        """Writes the sampled token of each slot after its known tokens. indices: slots. ends:
        number of known tokens of each. All three: [N]."""
        self.token_ids[indices, ends] = token_ids
