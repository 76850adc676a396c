"""AnswerAttention: keeps with which queries the tokens of answers were chosen, and computes from
them what each attended to, once an answer has ended.

    pass    rows of cross attention   [a a | b]    queries of the chosen heads are kept, by position
    end     all queries of an answer, times the keys of its items: one product for each head

Weights are computed once for a whole answer, as a product for each token would cost far more.
Shapes: n tokens, h heads, L tokens of the items, H heads of a layer, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdeploy_llm.layers.attention.cross import WatchedRows
from mmdeploy_llm.layers.transfer import to_device
from mmdeploy_llm.values.plan import NewRequest, ScheduledTokens, stop_ids_of

from .drafts import SampleRows
from .encoder_cache import EncoderCache
from .outcome import StepOutcome
from .slots import Slots


class AnswerAttention:
    """The queries of running requests with heads. The runner is its only writer."""

    def __init__(
        self,
        slots: Slots,
        encoder: EncoderCache,
        device: torch.device,
        own: Callable[[Tensor, int], Tensor] | None = None,
    ) -> None:
        """own: `Model.answer_attention`; None: weights are computed of the queries."""
        self._slots, self._encoder, self._device, self._own = slots, encoder, device, own
        self._queries: dict[str, list[Tensor]] = {}  # [h, D] of each token, from the first on

    def drop(self, request_id: str) -> None:
        """Forgets a request that has left its slot."""
        self._queries.pop(request_id, None)

    def watched(self, scheduled: Sequence[ScheduledTokens]) -> WatchedRows | None:
        """Returns the rows of a pass after which a token of such an answer stands; None without
        any."""
        if self._own is not None:
            return None
        rows, layers, end = list[int](), set[int](), 0
        for item in scheduled:
            request = self._slots[item.request_id].request
            end += item.num_tokens
            if request.heads:
                rows += range(end - _num_rows(item, request), end)
                layers.update(layer for layer, _ in request.heads)
        if not rows:
            return None
        return WatchedRows(
            rows=to_device(np.array(rows, dtype=np.int64), self._device), layers=frozenset(layers)
        )

    def keep(self, scheduled: Sequence[ScheduledTokens], watched: WatchedRows) -> None:
        """Keeps the queries of a pass. A position that is computed again takes the place of what
        was kept of it and of all after it."""
        picked, start = dict[tuple[tuple[int, int], ...], Tensor](), 0
        for item in scheduled:
            request = self._slots[item.request_id].request
            count = _num_rows(item, request) if request.heads else 0
            if not count:
                continue
            if request.heads not in picked:
                chosen = [watched.queries[layer][:, head] for layer, head in request.heads]
                picked[request.heads] = torch.stack(chosen, 1)
            own = self._queries.setdefault(item.request_id, [])
            first = item.start + item.num_tokens - count - (request.prompt_len - 1)
            assert first <= len(own), "the passes of a request follow one another"
            own[first:] = picked[request.heads][start : start + count].unbind()
            start += count

    def add(self, rows: SampleRows, outcome: StepOutcome) -> None:
        """Adds the weights of the answers that end with the tokens in `outcome`."""
        for item, known in zip(rows.items, rows.ends.tolist(), strict=True):
            request, name = self._slots[item.request_id].request, item.request_id
            if request.heads and name in outcome.sampled:
                new = (outcome.sampled[name], *outcome.later.get(name, ()))
                count = self._length(request, known, new)
                if count is not None:
                    outcome.attention[name] = self._weights(request, count)

    def _length(self, request: NewRequest, known: int, new: Sequence[int]) -> int | None:
        """Returns the tokens of an answer that ends within the new ones, as the scheduler will end
        it; None for one that goes on."""
        params, most = request.params, self._slots.token_ids.shape[1] - 1
        ends = stop_ids_of(params, request.eos_token_ids)
        if params.max_tokens is not None:
            most = min(most, request.prompt_len + params.max_tokens)
        for num_tokens, token in enumerate(new, known + 1):
            if token in ends or num_tokens >= most:
                return num_tokens - request.prompt_len
        return None

    def _weights(self, request: NewRequest, count: int) -> NDArray[np.float32]:
        """Returns the weights of an answer, [n, h, L]."""
        items = [self._encoder.needed(span.item.key) for span in request.media]
        if self._own is not None:
            (kept,) = items
            return self._own(kept, count).float().cpu().numpy()
        queries = torch.stack(self._queries[request.request_id][:count], 1).float()  # [h, n, D]
        found = []
        for own, (layer, head) in zip(queries, request.heads, strict=True):
            parts = [kept[layer, 0] for kept in items]  # [L, H, D]
            keys = torch.cat(parts) if len(parts) > 1 else parts[0]
            found.append((own @ keys[:, head].float().T).softmax(-1))
        return torch.stack(found, 1).cpu().numpy()


def _num_rows(item: ScheduledTokens, request: NewRequest) -> int:
    """Returns after how many of an item's tokens, the last ones, a token of the answer stands."""
    end = item.start + item.num_tokens
    return min(item.num_tokens, max(0, end - (request.prompt_len - 1)))
