"""EncoderBudget: what the encoder cache holds, who needs it, and what a step may encode."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence

from mmdeploy_llm.request import MediaInput


class EncoderBudget:
    """Accounting of the encoder cache by media key; the tensors are in the runner.

                      hold (encoded in this step)        last holder releases it
            unknown -----------------------------> HELD <---------------------> IDLE
               ^                                    |            hold            |
               +------------- discard --------------+                            |
               +------------- evicted, least recently used first ---------------+   -> plan.forget

    A request holds an item from the step that computes the item's first token to the step that
    computes its last. Between steps it holds at most one item, or all of those outside of its
    prompt, which it holds from its first step on; it needs no other item to finish these, so
    holders never wait for each other. Held and idle tokens together stay within
    `capacity`. A step encodes at most `step_capacity` tokens, or one item if that item is larger.
    The scheduler is the only writer.
    """

    def __init__(self, *, capacity: int, step_capacity: int) -> None:
        self.capacity = capacity
        self.step_capacity = step_capacity
        self.num_cached_tokens = 0
        self.num_held_tokens = 0
        self._num_tokens: dict[str, int] = {}  # key -> size, for all that is cached
        self._holders: dict[str, dict[str, None]] = {}  # key -> request ids, never empty
        self._held: dict[str, dict[str, None]] = {}  # request id -> keys, never empty
        self._idle: OrderedDict[str, None] = OrderedDict()  # oldest first, evicted in this order
        self._forget: dict[str, None] = {}
        self._encode: list[MediaInput] = []
        self._num_encode_tokens = 0
        self._is_closed = False

    def start_step(self) -> None:
        """Starts a new step: nothing to encode yet, new items are accepted."""
        self._encode = []
        self._num_encode_tokens = 0
        self._is_closed = False

    def close_step(self) -> None:
        """Accepts no more items in this step, so that the first one refused is served first."""
        self._is_closed = True

    def num_holdable(
        self, request_id: str, items: Sequence[MediaInput], *, is_whole: bool = False
    ) -> int:
        """Returns how many of `items`, from the first on, the request could hold in this step.
        is_whole: it needs all of them at once, so that together they count as one item."""
        own = self._held.get(request_id, {})
        num_held, num_encode = self.num_held_tokens, self._num_encode_tokens
        counted: set[str] = set()
        for index, item in enumerate(items):
            if item.key in own or item.key in counted:
                continue
            counted.add(item.key)
            if item.key not in self._holders:
                num_held += item.num_tokens
            if item.key not in self._num_tokens:
                others = self._num_encode_tokens if is_whole else num_encode
                if others and num_encode + item.num_tokens > self.step_capacity:
                    return index
                num_encode += item.num_tokens
            if self._is_closed or num_held > self.capacity:
                return index
        return len(items)

    def hold(self, request_id: str, items: Sequence[MediaInput]) -> None:
        """Holds `items`, with which the request computes in this step; encodes those not cached."""
        holdable = self.num_holdable(request_id, items, is_whole=True)
        assert holdable == len(items), "more media than the cache holds"
        for item in sorted(items, key=lambda item: item.key not in self._num_tokens):
            # Cached items first: an item that is held already is not evicted for the next one.
            if item.key not in self._num_tokens:
                self._add(item)
            self._pin(item.key, request_id)

    def keep_only(self, request_id: str, keys: Collection[str] = ()) -> None:
        """Releases all items of the request, except those with `keys`."""
        for held in [held for held in self._held.get(request_id, ()) if held not in keys]:
            self._release(held, request_id)

    def discard(self, request_id: str) -> None:
        """Releases the items of a failed request, which may have caused the failure: those that
        nobody else holds are evicted."""
        keys = tuple(self._held.get(request_id, ()))
        self.keep_only(request_id)
        for key in keys:
            if key in self._idle:
                self._evict(key)

    def forget_again(self, keys: Iterable[str]) -> None:
        """Repeats the `forget` of a plan that may not have been carried out; cached keys stay."""
        self._forget.update((key, None) for key in keys if key not in self._num_tokens)

    def take_forget(self) -> tuple[str, ...]:
        """Returns the keys evicted since the last call, each once."""
        forget, self._forget = tuple(self._forget), {}
        return forget

    def take_encode(self) -> tuple[MediaInput, ...]:
        """Returns the items that this step encodes."""
        encode, self._encode = tuple(self._encode), []
        return encode

    def _add(self, item: MediaInput) -> None:
        while self.num_cached_tokens + item.num_tokens > self.capacity:
            self._evict(next(iter(self._idle)))
        self._num_tokens[item.key] = item.num_tokens
        self._idle[item.key] = None
        self.num_cached_tokens += item.num_tokens
        self._encode.append(item)
        self._num_encode_tokens += item.num_tokens

    def _pin(self, key: str, request_id: str) -> None:
        if key in self._idle:
            del self._idle[key]
            self._holders[key] = {}
            self.num_held_tokens += self._num_tokens[key]
        self._holders[key][request_id] = None
        self._held.setdefault(request_id, {})[key] = None

    def _release(self, key: str, request_id: str) -> None:
        del self._held[request_id][key]
        if not self._held[request_id]:
            del self._held[request_id]
        del self._holders[key][request_id]
        if not self._holders[key]:
            del self._holders[key]
            self._idle[key] = None
            self.num_held_tokens -= self._num_tokens[key]

    def _evict(self, key: str) -> None:
        del self._idle[key]
        self.num_cached_tokens -= self._num_tokens.pop(key)
        self._forget[key] = None

    def check_integrity(self, needed: Mapping[str, Iterable[str]]) -> None:
        """Raises AssertionError unless all counts agree. needed: request -> keys it must hold."""
        pairs = {(key, holder) for key, holders in self._holders.items() for holder in holders}
        assert pairs == {(key, id_) for id_, keys in self._held.items() for key in keys}
        assert set(self._held) <= set(needed), "an item is held by a request that is gone"
        for request_id, keys in needed.items():
            assert set(keys) <= set(self._held.get(request_id, ())), "a split item is not held"
        assert all(self._holders.values()), "an item without a holder among those held"
        assert all(self._held.values()), "a holder without an item"
        assert not set(self._idle) & set(self._holders), "items both idle and held"
        assert set(self._idle) | set(self._holders) == set(self._num_tokens), "lost items"
        assert self.num_cached_tokens == sum(self._num_tokens.values()) <= self.capacity
        assert self.num_held_tokens == sum(self._num_tokens[key] for key in self._holders)
