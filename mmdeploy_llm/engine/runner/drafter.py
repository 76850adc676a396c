"""Drafter: has the model's draft head guess tokens, and keeps what it needs for that.

The head has an entry in the KV cache for each token i of a request, which is made of the hidden
state of token i and of token i + 1. The entry of the last computed token can only be made with the
next token, and those of drafts only when it is known which were right. So the hidden states of the
last tokens of each slot are kept:

    entries made             kept hidden states       not computed yet
    0 1 2 3 4 5 6 7 8 9      10 11 12                 13
                             entries 10, 11, 12 are made when tokens 11, 12, 13 are known:

    prompts      at the end of the step, up to the entry before the last
    drafts       when the next ones are guessed: the last entry guesses the first of them, and the
                 entries after it are made of guesses, and made again later
    other steps  when there are many, or a block is full, which other requests may use

What is missing or wrong in an entry makes a guess worse, and never an answer: a draft is accepted
if it is the token that is sampled. The last entry of a block depends on a token after the block, so
a request that goes on differently after a cached prefix has one entry of another text.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mmdeploy_llm.engine.runner.sampling.largest import first_argmax
from mmdeploy_llm.forward import ForwardInputs
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.hooks.objects.attention import AttentionBackend, KVCache
from mmdeploy_llm.hooks.records import FAULTS
from mmdeploy_llm.layers.transfer import to_device
from mmdeploy_llm.system.sharding.peers import Peers
from mmdeploy_llm.values.plan import UNKNOWN, ScheduledTokens, stop_ids_of

from .batch import StepBatch, prepare
from .checked import CheckedModel
from .encoder_cache import EncoderCache
from .slots import Slots

logger = logging.getLogger(__name__)

MAX_ROWS = 8  # tokens of an item whose hidden states are kept: the last one and drafts
NUM_KEPT = 32  # hidden states of a slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """Entries start .. start + count of a request, to be made."""

    request_id: str
    start: int
    count: int


class Drafter:
    """Guesses for one runner, its only user."""

    def __init__(
        self,
        model: CheckedModel,
        backend: AttentionBackend,
        cache: KVCache,
        slots: Slots,
        encoder: EncoderCache,
        peers: Peers,
    ) -> None:
        self._model, self._backend, self._cache = model, backend, cache
        self._slots, self._encoder, self._peers = slots, encoder, peers
        self._device = cache.keys[0].device
        num_slots = slots.token_ids.shape[0]
        self._hidden: Tensor | None = None  # [slots * NUM_KEPT, hidden]
        self._has_guesses = [True] * num_slots  # whether anything is kept of a slot
        self._firsts = [0] * num_slots  # token of the first state that is kept
        self._counts = [0] * num_slots

    def admit(self, slot: int, *, has_guesses: bool) -> None:
        """Forgets the last request of a slot. has_guesses: see NewRequest."""
        self._counts[slot] = 0
        self._has_guesses[slot] = has_guesses

    def is_ready(self, scheduled: Sequence[ScheduledTokens]) -> bool:
        """Whether anything is kept of any of these requests."""
        return any(self._has_guesses[self._slots[item.request_id].index] for item in scheduled)

    def guess(
        self, scheduled: Sequence[ScheduledTokens], *, knows_last: bool
    ) -> list[ScheduledTokens]:
        """Returns the items of the next step with their drafts, and makes the entries that are due.
        knows_last: whether the first token of each item is known on the host."""
        try:
            own = [item for item in scheduled if self.is_ready([item])]
            for item in own:
                self._rewind(self._slots[item.request_id].index, item.start)
            others = [item for item in own if not item.drafts]
            self._make_due(others, knows_last=knows_last)
            found = self._guesses([item for item in scheduled if item.drafts])
        except FAULTS as error:
            self._peers.raised(error)
            logger.warning("the draft head failed: %s", error_text(error))
            found = {}
        return [
            replace(item, drafts=_filled(found.get(item.request_id, ()), len(item.drafts)))
            if item.drafts
            else item
            for item in scheduled
        ]

    def keep(self, batch: StepBatch, hidden: Tensor) -> None:
        """Keeps hidden states [T, hidden] of a pass. Of prompts, makes the entries."""
        if self._hidden is None:
            size = len(self._counts) * NUM_KEPT
            self._hidden = hidden.new_empty(size, hidden.shape[1])
        long: list[tuple[ScheduledTokens, int]] = []
        short: list[tuple[range, range]] = []  # rows of `hidden`, and the places that keep them
        for item, last in zip(batch.scheduled, batch.last_rows.tolist(), strict=True):
            slot = self._slots[item.request_id]
            if not self._has_guesses[slot.index]:
                continue
            self._rewind(slot.index, item.start)
            if item.start < slot.request.prompt_len or item.num_tokens > MAX_ROWS:
                long.append((item, last))
                continue
            rows = range(last + 1 - item.num_tokens, last + 1)
            short.append((rows, self._new_places(slot.index, item.start, item.num_tokens)))
        if len(short) == 1:  # a step of one request: two indices on the device would take longer
            rows, places = short[0]
            self._hidden[places.start : places.stop].copy_(hidden[rows.start : rows.stop])
        elif short:
            sources, targets = (
                to_device(np.concatenate(own), self._device) for own in zip(*short, strict=True)
            )
            self._hidden.index_copy_(0, targets, hidden[sources])
        if long:
            self._make_prompts(long, hidden)

    def _make_prompts(self, items: Sequence[tuple[ScheduledTokens, int]], hidden: Tensor) -> None:
        """Makes the entries of long items, all but the last, whose hidden state is kept. items:
        with the row of each one's last token in `hidden`."""
        made: list[tuple[Entries, Tensor]] = []
        for item, last in items:
            slot = self._slots[item.request_id].index
            kept, count = self._kept(slot), self._counts[slot]
            own = torch.cat([kept, hidden[last + 1 - item.num_tokens : last]])
            start = item.start - count
            entries = Entries(request_id=item.request_id, start=start, count=own.shape[0])
            if entries.count:
                made.append((entries, own))
        if made:
            self._make(made)
        assert self._hidden is not None
        for item, last in items:
            slot, end = self._slots[item.request_id].index, item.start + item.num_tokens
            self._counts[slot] = 0
            (place,) = self._new_places(slot, end - 1, 1)
            self._hidden[place].copy_(hidden[last])

    def _make_due(self, scheduled: Sequence[ScheduledTokens], *, knows_last: bool) -> None:
        """Makes entries of slots with many kept states, or with the last one of a block."""
        due: list[tuple[Entries, Tensor]] = []
        for item in scheduled:
            slot = self._slots[item.request_id].index
            first, count = self._firsts[slot], self._counts[slot]
            size = self._cache.block_size
            is_due = count > NUM_KEPT - MAX_ROWS or first // size < (first + count) // size
            if not (count and is_due):
                continue
            if not knows_last:
                count = min(count, item.start - 1 - first)
            if count > 0:
                entries = Entries(request_id=item.request_id, start=first, count=count)
                due.append((entries, self._kept(slot)[:count]))
        if not due:
            return
        self._make(due)
        for entries, _ in due:
            slot = self._slots[entries.request_id].index
            left = self._kept(slot)[entries.count :].clone()
            self._firsts[slot] += entries.count
            self._counts[slot] = left.shape[0]
            self._kept(slot).copy_(left)

    def _guesses(self, items: Sequence[ScheduledTokens]) -> dict[str, list[int]]:
        """Returns the guesses of each item, as many as it has drafts, up to a token that ends the
        request; none for one whose last hidden state is not kept."""
        ready = [item for item in items if self._counts[self._slots[item.request_id].index]]
        found: dict[str, list[int]] = {item.request_id: [] for item in ready}
        made = []
        for item in ready:
            slot = self._slots[item.request_id].index
            first, count = self._firsts[slot], self._counts[slot]
            entries = Entries(request_id=item.request_id, start=first, count=count)
            made.append((entries, self._kept(slot)))
        states: dict[str, Tensor] = {}
        going = ready
        while going:
            states = self._make(made)
            logits = self._model.logits(torch.stack([states[x.request_id] for x in going]))
            token_ids = first_argmax(logits)[0].tolist()
            for item, token_id in zip(going, token_ids, strict=True):
                own = found[item.request_id]
                own.append(token_id)
                slot = self._slots[item.request_id].index
                self._slots.token_ids[slot, item.start + len(own)] = token_id
            going = [item for item in going if self._goes_on(item, found[item.request_id])]
            made = [
                (
                    Entries(
                        request_id=item.request_id,
                        start=item.start + len(found[item.request_id]) - 1,
                        count=1,
                    ),
                    states[item.request_id][None],
                )
                for item in going
            ]
        for item in ready:
            self._counts[self._slots[item.request_id].index] = 0
        return {name: self._before_end(name, own) for name, own in found.items()}

    def _goes_on(self, item: ScheduledTokens, found: Sequence[int]) -> bool:
        """Whether an item needs another guess after `found`."""
        return len(self._before_end(item.request_id, found)) == len(found) < len(item.drafts)

    def _before_end(self, request_id: str, found: Sequence[int]) -> list[int]:
        """Returns guesses up to one that ends the request: nothing is sampled after it."""
        request = self._slots[request_id].request
        stops = stop_ids_of(request.params, request.eos_token_ids)
        end = next((at for at, token_id in enumerate(found) if token_id in stops), len(found))
        return list(found[:end])

    def _make(self, made: Sequence[tuple[Entries, Tensor]]) -> dict[str, Tensor]:
        """Makes entries of their hidden states [count, hidden]; returns the state of the last one
        of each request."""
        made = sorted(made, key=lambda one: one[0].count > 1)  # single ones come first
        items = [
            ScheduledTokens(
                request_id=entries.request_id, start=entries.start, num_tokens=entries.count
            )
            for entries, _ in made
        ]
        batch = prepare(
            items,
            self._slots,
            self._cache.block_size,
            self._model.num_axes,
            self._device,
            ahead=1,
        )
        states = self._model.draft(self._inputs(batch), torch.cat([own for _, own in made]))
        # The head may write its next states to the same memory.
        last = states[to_device(batch.last_rows, self._device)]
        return {item.request_id: own for item, own in zip(items, last, strict=True)}

    def _inputs(self, batch: StepBatch) -> ForwardInputs:
        token_ids, positions, in_prompt, layout, is_long = batch.tensors
        rows, embeds = None, None
        if batch.media:
            rows, embeds = batch.media_inputs(self._encoder.needed, self._device)
        return ForwardInputs(
            token_ids=token_ids,
            positions=positions,
            in_prompt=in_prompt,
            has_prompt=batch.has_prompt,
            attn=self._backend.begin(layout, self._cache),
            media_rows=rows,
            media_embeds=embeds,
            is_long=is_long,
        )

    def _rewind(self, slot: int, start: int) -> None:
        """Drops what is kept of tokens from `start` on: drafts that were wrong, or a step that is
        computed again."""
        self._counts[slot] = max(0, min(self._counts[slot], start - self._firsts[slot]))

    def _kept(self, slot: int) -> Tensor:
        """Returns the hidden states that are kept of a slot, [count, hidden]."""
        assert self._hidden is not None, "a step has been computed before there are any"
        begin = slot * NUM_KEPT
        return self._hidden[begin : begin + self._counts[slot]]

    def _new_places(self, slot: int, start: int, count: int) -> range:
        """Returns the places of `count` more states of a slot, which are of the tokens from `start`
        on; forgets others where these do not follow them, or there is no room."""
        held = self._counts[slot]
        if self._firsts[slot] + held != start or held + count > NUM_KEPT:
            held = 0
        if not held:
            self._firsts[slot] = start
        self._counts[slot] = held + count
        begin = slot * NUM_KEPT + held
        return range(begin, begin + count)


def _filled(found: Sequence[int], count: int) -> tuple[int, ...]:
    """Returns `count` drafts: those that were found, then UNKNOWN."""
    return (*found, *[UNKNOWN] * (count - len(found)))[:count]
