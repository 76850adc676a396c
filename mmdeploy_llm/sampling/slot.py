"""What the sampler remembers of one running request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmdeploy_llm.params import SamplingParams

from .grammar import GrammarMatcher

Ints = NDArray[np.int64]
NO_IDS: Ints = np.empty(0, dtype=np.int64)
NO_IDS.flags.writeable = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRequest:
    """A request as the sampler takes it. params: every field resolved.

    output_token_ids: generated before a preemption. bad_words_token_ids: id sequences that must not
    occur. reasoning_end_ids: written when `reasoning_max_tokens` is reached; () when nothing is
    open.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int] = ()
    eos_token_ids: frozenset[int] = frozenset()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    reasoning_end_ids: tuple[int, ...] = ()


class TokenCounts:
    """Distinct token ids and how often each was generated: arrays that grow with the request.

    The penalties touch these ids only, so that no [slots, vocabulary] matrix of counts is needed.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        distinct = np.unique(np.asarray(prompt_ids, dtype=np.int64))
        self._ids: Ints = np.concatenate([distinct, np.zeros(64, dtype=np.int64)])
        self._counts: Ints = np.zeros(len(self._ids), dtype=np.int64)
        self._places = {token_id: place for place, token_id in enumerate(distinct.tolist())}

    @property
    def ids(self) -> Ints:
        """Distinct ids of prompt and output."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> Ints:
        """How often each of `ids` was generated; 0 for those of the prompt only."""
        return self._counts[: len(self._places)]

    def append(self, token_id: int) -> None:
        """Counts a generated token."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token_id
        self._counts[place] += 1


class NGrams:
    """Which tokens would repeat an n-gram of the sequence."""

    def __init__(self, size: int, token_ids: Sequence[int]) -> None:
        self._size = size
        self._followers: dict[tuple[int, ...], list[int]] = {}
        self._tail: tuple[int, ...] = ()
        for token_id in token_ids:
            self.append(token_id)

    @property
    def banned(self) -> Ints:
        """Ids that followed the present last n - 1 tokens before."""
        found = self._followers.get(self._tail) if len(self._tail) == self._size - 1 else None
        return np.array(found, dtype=np.int64) if found else NO_IDS

    def append(self, token_id: int) -> None:
        """Takes the next token of the sequence."""
        if len(self._tail) == self._size - 1:
            self._followers.setdefault(self._tail, []).append(token_id)
        self._tail = (*self._tail, token_id)[1 - self._size :] if self._size > 1 else ()


class ReasoningBudget:
    """Writes the end of the reasoning once it has used up its tokens."""

    def __init__(self, most: int, end_ids: tuple[int, ...], written: Sequence[int]) -> None:
        self._left = most
        self._end_ids = end_ids
        self._forced: tuple[int, ...] = ()
        self._recent: tuple[int, ...] = ()
        self._is_open = True
        for token_id in written:
            self.append(token_id)

    @property
    def forced(self) -> int | None:
        """The id that must come next, None when the model is free."""
        return self._forced[0] if self._forced else None

    def append(self, token_id: int) -> None:
        """Takes the next generated token."""
        if self._forced:
            self._forced = self._forced[1:]
            return
        if not self._is_open:
            return
        self._recent = (*self._recent, token_id)[-len(self._end_ids) :]
        self._left -= 1
        if self._recent == self._end_ids:
            self._is_open = False
        elif self._left <= 0:
            self._is_open, self._forced = False, self._end_ids


class Slot:
    """State of one request. The sampler is its only writer."""

    def __init__(self, request: SlotRequest, grammar: GrammarMatcher | None) -> None:
        params = request.params
        self.params = params
        self.output_ids = list(request.output_token_ids)
        self.held_back = np.array(
            sorted({*request.eos_token_ids, *params.stop_token_ids}), dtype=np.int64
        )
        self.bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self.bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        words = request.bad_words_token_ids
        self._bad_tokens = np.array([w[0] for w in words if len(w) == 1], dtype=np.int64)
        self._bad_words = [word for word in words if len(word) > 1]
        self.counts = TokenCounts(request.prompt_token_ids) if _has_penalty(params) else None
        tokens = (*request.prompt_token_ids, *request.output_token_ids)
        size = params.no_repeat_ngram_size
        self.ngrams = NGrams(size, tokens) if size else None
        self.grammar = grammar
        self.budget: ReasoningBudget | None = None
        if params.reasoning_max_tokens is not None and request.reasoning_end_ids:
            self.budget = ReasoningBudget(
                params.reasoning_max_tokens, request.reasoning_end_ids, self.output_ids
            )
        for token_id in self.output_ids:
            if self.counts is not None:
                self.counts.append(token_id)
            if self.grammar is not None:
                self.grammar.accept(token_id)
        self._is_shaped = bool(
            len(self.bias_ids) or words or self.counts or self.ngrams or grammar or self.budget
        )

    @property
    def is_plain(self) -> bool:
        """Whether the next token is simply the most probable one."""
        is_held_back = len(self.output_ids) < self.params.min_tokens and len(self.held_back) > 0
        return self.params.is_greedy and not self._is_shaped and not is_held_back

    def banned(self) -> Ints:
        """Ids that must not come next."""
        parts = [self._bad_tokens]
        if len(self.output_ids) < self.params.min_tokens:
            parts.append(self.held_back)
        for word in self._bad_words:
            if tuple(self.output_ids[1 - len(word) :]) == word[:-1]:
                parts.append(np.array(word[-1:], dtype=np.int64))
        if self.ngrams is not None:
            parts.append(self.ngrams.banned)
        return np.concatenate(parts)

    def append(self, token_id: int) -> None:
        """Takes the sampled token."""
        self.output_ids.append(token_id)
        for part in (self.counts, self.ngrams, self.budget):
            if part is not None:
                part.append(token_id)
        if self.grammar is not None:
            self.grammar.accept(token_id)


def _has_penalty(params: SamplingParams) -> bool:
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (
        1.0,
        0.0,
        0.0,
    )
