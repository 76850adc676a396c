"""SamplingState: the sampler's state of each running request. Numbers are held in arrays over
slots, everything else in one SlotState for each request."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmdeploy_llm.values.params import EarlyStopParams, NoRepeatNGramParams, SamplingParams

from .draw import DrawParams, first_states, uniforms
from .grammar import GrammarBackend
from .guide import Guide
from .processors import ActiveProcessor, LogitsProcessors
from .trackers import BadSequences, NGrams, ThinkingCap, TokenCounts

NO_LOGPROBS = -2  # -1 requests the whole vocabulary
TINY, HUGE = 1e-30, 1e30  # bounds of what is applied to a logit in float32: no NaN arises


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRequest:
    """A request as the sampler gets it when it starts, or starts again after a preemption.

    params: with every field resolved.
    output_token_ids: generated before a preemption.
    bad_words_token_ids: sequences that are never generated, those of params included.
    reasoning_end_ids: forced after params.reasoning_max_tokens tokens; () forces nothing.
    prompt_text: of a request with a constraint, from which its reasoning parser starts.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int] = ()
    eos_token_ids: Collection[int] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    reasoning_end_ids: tuple[int, ...] = ()
    prompt_text: str = ""


class SlotState:
    """The state of one request. SamplingState is its only writer.

    banned_ids: never generated.
    stop_ids: not generated before params.min_tokens.
    bias_ids, bias_values: logit_bias.
    grammar, thinking, counts, ngrams, bad_sequences: trackers; None where the request needs none.
    processors: logits processors, which see output_token_ids; () where the request uses none.
    num_before: tokens still to come that belong to the prompt, see LogitsRow.num_before.
    """

    def __init__(
        self,
        request: SlotRequest,
        vocab_size: int,
        grammar: Guide | None,
        processors: LogitsProcessors | None = None,
    ) -> None:
        self.params = params = request.params
        sequences = request.bad_words_token_ids
        self.banned_ids = _ids((ids[0] for ids in sequences if len(ids) == 1), vocab_size)
        self.stop_ids = _ids((*request.eos_token_ids, *params.stop_token_ids), vocab_size)
        self.bias_ids = _ids(params.logit_bias, vocab_size)
        biases = np.array([params.logit_bias[one] for one in self.bias_ids], dtype=np.float64)
        self.bias_values = biases.clip(-HUGE, HUGE).astype(np.float32)
        self.grammar = grammar
        self.thinking = _thinking(request)
        self.counts = _counts(request, vocab_size)
        self.ngrams = _ngrams(request)
        self.bad_sequences = _bad_sequences(request)
        self.output_token_ids, self.num_before = list(request.output_token_ids), 0
        found: tuple[ActiveProcessor, ...] = ()
        if processors is not None:
            found = processors.start(params, request.prompt_token_ids, self.output_token_ids)
            self.num_before = max((one.row.num_before for one in found), default=0)
        self.processors = found[:0]
        for token_id in request.output_token_ids:  # which `found` knows
            self.append(token_id)
        self.processors = found

    @property
    def has_transforms(self) -> bool:
        """Whether rules other than min_tokens change the logits of every step."""
        trackers = (self.counts, self.ngrams, self.bad_sequences, self.grammar)
        is_tracked = any(tracker is not None for tracker in trackers)
        has_edits = len(self.banned_ids) > 0 or len(self.bias_ids) > 0
        return is_tracked or has_edits or bool(self.processors)

    @property
    def has_trackers(self) -> bool:
        """Whether any tracker must receive the generated tokens."""
        trackers = (self.counts, self.ngrams, self.bad_sequences, self.grammar, self.thinking)
        return any(tracker is not None for tracker in trackers) or bool(self.processors)

    @property
    def needs_host(self) -> bool:
        """Whether a rule needs more than the counts of the generated tokens, which the device can
        keep itself."""
        trackers = (self.ngrams, self.bad_sequences, self.grammar, self.thinking)
        return any(tracker is not None for tracker in trackers) or bool(self.processors)

    @property
    def forced(self) -> int | None:
        """The token that must come next because the thinking is at its limit; None if any may."""
        has_answer = self.grammar is not None and self.grammar.is_answering
        return None if self.thinking is None or has_answer else self.thinking.forced

    def append(self, token_id: int) -> None:
        """Records the next generated token."""
        if self.num_before:
            self.num_before -= 1
        elif self.grammar is not None:
            self.grammar.accept(token_id)
        for tracker in (self.counts, self.ngrams, self.bad_sequences, self.thinking):
            if tracker is not None:
                tracker.append(token_id)
        if self.processors:
            self.output_token_ids.append(token_id)

    def banned_now(self) -> Iterable[int]:
        """Yields the ids that would complete a repeated n-gram or a bad sequence."""
        for tracker in (self.ngrams, self.bad_sequences):
            if tracker is not None:
                yield from tracker.banned()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotNumbers:
    """The state of one slot as numbers, for the tables on a device.

    draw: params of the next draw, one row.
    first_state: [1], see uniform.first_states.
    num_outputs: tokens generated so far.
    stops_from: number of outputs before a stop token is allowed.
    """

    draw: DrawParams
    first_state: NDArray[np.uint64]
    num_outputs: int
    stops_from: int


class SamplingState:
    """The state of all slots. The Sampler is its only writer.

    Its arrays are [max_num_slots]; the values of a free slot are undefined.
    """

    def __init__(
        self,
        max_num_slots: int,
        vocab_size: int,
        grammars: GrammarBackend | None = None,
        processors: LogitsProcessors | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self._grammars = grammars
        self._processors = processors
        self._slots: list[SlotState | None] = [None] * max_num_slots
        self.is_random = np.zeros(max_num_slots, dtype=bool)
        self.num_logprobs = np.full(max_num_slots, NO_LOGPROBS)
        self.certainty = np.full(max_num_slots, np.inf, dtype=np.float32)  # log of a threshold
        self.has_early_stops = False  # whether any request ever had one
        self._temperature = np.ones(max_num_slots, dtype=np.float32)
        self._top_k = np.zeros(max_num_slots, dtype=np.int64)
        self._top_p = np.ones(max_num_slots)
        self._min_p = np.zeros(max_num_slots)
        self._seeds = np.zeros(max_num_slots, dtype=np.uint64)
        self._num_outputs = np.zeros(max_num_slots, dtype=np.int64)
        self._stops_from = np.zeros(max_num_slots, dtype=np.int64)  # see SlotNumbers
        self._has_transforms = np.zeros(max_num_slots, dtype=bool)
        self._has_trackers = np.zeros(max_num_slots, dtype=bool)

    def __getitem__(self, slot: int) -> SlotState:
        state = self._slots[slot]
        assert state is not None, f"slot {slot} is free"
        return state

    def add(self, slot: int, request: SlotRequest) -> None:
        """Puts a request into a free slot. Raises RequestError or ConfigError when its grammar
        cannot be compiled, PluginError when a logits processor fails."""
        assert self._slots[slot] is None, f"slot {slot} is in use"
        params, guided = request.params, request.params.guided_decoding
        grammar = None
        if guided is not None:
            assert self._grammars is not None, "refused at intake without a grammar backend"
            grammar = self._grammars.guide(guided, request.prompt_text)
        has_processors = bool(params.logits_processors or params.logits_processors_args)
        assert not has_processors or self._processors is not None, "refused at intake"
        processors = self._processors if has_processors else None
        state = SlotState(request, self.vocab_size, grammar, processors)
        self.is_random[slot] = not params.is_greedy
        self.num_logprobs[slot] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.certainty[slot] = _certainty(params)
        self.has_early_stops |= params.early_stop is not None
        self._temperature[slot] = min(max(resolved(params.temperature), TINY), HUGE)
        top_k = int(resolved(params.top_k))
        self._top_k[slot] = top_k if 0 < top_k < self.vocab_size else 0
        self._top_p[slot] = resolved(params.top_p)
        self._min_p[slot] = resolved(params.min_p)
        self._seeds[slot] = int(resolved(params.seed))
        self._num_outputs[slot] = len(request.output_token_ids)
        self._stops_from[slot] = params.min_tokens if len(state.stop_ids) else 0
        self._has_transforms[slot] = state.has_transforms
        self._has_trackers[slot] = state.has_trackers
        self._slots[slot] = state

    def remove(self, slot: int) -> None:
        """Frees a slot; does nothing if it is free."""
        self._slots[slot] = None

    def move_to_device(self, slot: int) -> None:
        """Leaves the rules and token counts of a slot to the device from now on."""
        self._stops_from[slot] = 0
        self._has_transforms[slot] = self._has_trackers[slot] = False

    def tracked(self, slots: NDArray[np.int64]) -> dict[int, SlotState]:
        """Returns row -> state for the rows whose trackers must receive their tokens."""
        return {row: self[slots[row]] for row in np.flatnonzero(self._has_trackers[slots]).tolist()}

    def holds(self, slot: int, state: SlotState) -> bool:
        """Whether the request of `state` is still in the slot."""
        return self._slots[slot] is state

    def is_mixed(self, slots: NDArray[np.int64]) -> bool:
        """Whether any of the slots is drawn with neither top_k nor min_p, which needs the
        probabilities of the whole vocabulary."""
        return bool(((self._top_k[slots] == 0) & (self._min_p[slots] == 0)).any())

    def numbers(self, slot: int) -> SlotNumbers:
        """Returns the state of a slot as numbers."""
        return SlotNumbers(
            draw=self.draw_params(np.array([slot])),
            first_state=first_states(self._seeds[[slot]]),
            num_outputs=int(self._num_outputs[slot]),
            stops_from=int(self._stops_from[slot]),
        )

    def append(self, slots: NDArray[np.int64], token_ids: Sequence[int]) -> None:
        """Records the next token of each of `slots`, which are all different."""
        self._num_outputs[slots] += 1
        for row in np.flatnonzero(self._has_trackers[slots]).tolist():
            self[slots[row]].append(token_ids[row])

    def bans_stops(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns [N]: whether min_tokens forbids that the next token stops the request."""
        return self._num_outputs[slots] < self._stops_from[slots]

    def needs_transforms(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns [N]: whether rules change the logits of the next token."""
        return self._has_transforms[slots] | self.bans_stops(slots)

    def forced(self, slots: NDArray[np.int64]) -> dict[int, int]:
        """Returns row -> next token for the rows whose thinking is at its limit."""
        tracked = np.flatnonzero(self._has_trackers[slots]).tolist()
        found = {row: self[slots[row]].forced for row in tracked}
        return {row: token_id for row, token_id in found.items() if token_id is not None}

    def draw_params(self, slots: NDArray[np.int64]) -> DrawParams:
        """Returns the params of the next draw of each of `slots`."""
        return DrawParams(
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
            uniforms=uniforms(self._seeds[slots], self._num_outputs[slots].astype(np.uint64)),
        )


def resolved(value: float | None) -> float:
    """Returns the value of a param, which intake has set: None never gets here."""
    assert value is not None, "params are resolved at intake"
    return value


def _certainty(params: SamplingParams) -> float:
    """Returns the log-probability above which a token is nearly certain; inf where nobody asks."""
    if not isinstance(params.early_stop, EarlyStopParams):
        return math.inf
    threshold = params.early_stop.threshold
    return math.log(threshold) if threshold > 0 else -math.inf


def _ids(ids: Iterable[int], vocab_size: int) -> NDArray[np.int64]:
    """Returns the ids that the model can generate, sorted, each once."""
    return np.array(sorted({one for one in ids if 0 <= one < vocab_size}), dtype=np.int64)


def _thinking(request: SlotRequest) -> ThinkingCap | None:
    limit = request.params.reasoning_max_tokens
    if limit is None or not request.reasoning_end_ids:
        return None
    return ThinkingCap(request.reasoning_end_ids, limit)


def _counts(request: SlotRequest, vocab_size: int) -> TokenCounts | None:
    params = request.params
    is_repetition = resolved(params.repetition_penalty) != 1
    if not (is_repetition or params.presence_penalty or params.frequency_penalty):
        return None
    # The other penalties apply to the output only.
    return TokenCounts(request.prompt_token_ids if is_repetition else (), vocab_size)


def _ngrams(request: SlotRequest) -> NGrams | None:
    size, own = request.params.no_repeat_ngram_size, request.params.no_repeat_ngram
    if isinstance(own, NoRepeatNGramParams):
        return NGrams(own.size, window=own.window, may_repeat=own.may_repeat_token_ids)
    return NGrams(size, request.prompt_token_ids) if size else None


def _bad_sequences(request: SlotRequest) -> BadSequences | None:
    sequences = [ids for ids in request.bad_words_token_ids if len(ids) > 1]
    return BadSequences(sequences, request.prompt_token_ids) if sequences else None
