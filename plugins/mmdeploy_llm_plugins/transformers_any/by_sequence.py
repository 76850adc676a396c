"""BySequence: runs transformers' own forward on one sequence after the other. Keys and values lie
in the engine's pages, states in its rows of states.

It is exact for any attention (biases, sinks, chunks, shared or chosen keys), and slower than
Together, which computes all sequences of a step at once. It serves what that one refuses. Sequences
that get one token each share a pass, where a trial has shown that this changes nothing.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.caches import PagedKV
from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.forward import ForwardInputs, SequenceAttention, SequenceRows, SideBySideAttention
from mmdeploy_llm_plugins.transformers_parts.cache import carriers, pages, side_by_side, states
from mmdeploy_llm_plugins.transformers_parts.mamba import layers_of_mixers

from . import limits, masks, mechanisms, rope, structure, trial
from .interface import refused
from .probe import Sizes
from .wrapped import Parts

logger = logging.getLogger(__name__)

# Tokens of the trial's passes. Many layers with a state continue from it for one token only.
STEPS = (4, 1, 2, 5)
ONE_BY_ONE = (4, *(1,) * 8)
CACHES = (*carriers.NAMES, "state")  # arguments that hold what is kept
BEGUN = (3, 7, 5)  # tokens of the sequences of the trial of a shared pass
NUM_SHARED = 2  # and its passes
# How much farther from transformers' logits STEPS may be than ONE_BY_ONE.
ROUNDING, ROUNDING_OF_HALF = 1e-3, 0.05


class BySequence:
    """Runs the decoder on one sequence of a step after the other.

    because: why the engine cannot compute all tokens together; raised if this way fails too.
    """

    def __init__(self, parts: Parts, because: ModelNotSupportedError) -> None:
        decoder = parts.decoder
        if hasattr(parts.inner, "get_image_features"):
            structure.check_decoder(parts.name, decoder)
            if parts.name not in masks.KNOWN:
                structure.check_masks(parts.name, parts.inner, decoder)
        self._parts = parts
        self._because = because
        self._limit = limits.of_decoder(parts.name, decoder)
        try:
            self._kept = pages.kept_by_layers(decoder.config)
        except Exception as error:  # transformers' code: anything may come
            reason = f"keeps what is not known here ({type(error).__name__}: {error})"
            raise refused(parts.name, "its cache", reason) from error
        self._places = pages.Places()
        self._slots = states.Slots()
        self._carrier = carriers.carrier_of(decoder)
        self._lent: Sequence[int] = ()  # layers that work on the engine's states themselves
        self._is_one_by_one = False
        # Why sequences that get one token each do not share a pass; None: they do.
        self._alone: str | None = "it was not tried yet"
        self._accepted = frozenset(inspect.signature(decoder.forward).parameters)
        if not self._accepted.intersection(CACHES):
            raise refused(parts.name, f"its decoder ({type(decoder).__name__})", "takes no cache")
        decoder.config._attn_implementation = "eager"

    def check_on_weights(self) -> Sizes:
        """Runs a trial in several steps. It shows that transformers' cache is all that the model
        keeps of earlier tokens, and whether passes of several tokens continue from states. Returns
        the sizes of the engine's cache."""
        rope.fix(self._parts.decoder)
        self._lent = layers_of_mixers(self._parts.decoder)
        self._try()
        self._alone = self._why_alone()
        if self._alone is not None:
            logger.warning(
                "%s computes each sequence of a step in a pass of its own, which is slower: %s",
                self._parts.name,
                self._alone,
            )
        # transformers' own attention reads whole sequences, whatever its windows.
        paged = PagedKV(num_kv_heads=1, head_dim=self._places.width)
        return Sizes(
            layers=(paged,) * self._num_paged,
            states=self._slots.cache if self._slots.index else None,
        )

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """Names what this way does for the model."""
        layers = {layer for layer, _ in self._places.index}
        copies = sum(layer >= len(self._kept) for layer in layers)
        config = self._parts.decoder.config
        own = mechanisms.of_kept(config, self._kept, copies)
        shared = mechanisms.SHARED if self._alone is None else mechanisms.ALONE
        return (mechanisms.ONE_AFTER_THE_OTHER, shared, *own)

    @property
    def _num_paged(self) -> int:
        """The number of the cache's layers with pages. A model without attention has one that
        nobody reads, since the engine counts a sequence's tokens by its pages."""
        return max(1, len(self._places.index))

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Returns the hidden states after the final norm, [T, hidden]."""
        self._limit.check(self._parts.name, inputs.positions)
        attn: Any = inputs.attn
        parts = self._parts
        is_text = inputs.media_rows is None and not parts.has_indicators
        embeds = None if is_text else parts.embed_inputs(inputs)
        given = inputs.token_ids, inputs.positions, embeds
        found: dict[int, Tensor] = {}
        shared = self._sharing(attn)
        if shared:
            passed = self._shared_pass(attn, shared, self._store(inputs, shared), *given)
            found = dict(zip(shared, passed, strict=True))
        for number in range(len(attn.sequences)):
            if number not in found:
                store = self._store(inputs, [number])
                found[number] = self._run(attn, number, store, *given, inputs)
        return torch.cat([found[number] for number in range(len(found))])

    def _store(self, inputs: ForwardInputs, numbers: Sequence[int]) -> states.Store | None:
        """Returns what holds the states of sequences; None for a model without any."""
        if not self._slots.index:
            return None
        assert inputs.states is not None, "the model has a cache with states"
        return states.Rows(self._slots, inputs.states, self._num_paged, numbers, self._lent)

    def _sharing(self, attn: SequenceAttention) -> list[int]:
        """Returns the sequences of a step that share a pass: none or several."""
        if self._alone is not None or not isinstance(attn, SideBySideAttention):
            return []
        found = [
            number
            for number, rows in enumerate(attn.sequences)
            if rows.num_cached and rows.end - rows.start == 1
        ]
        return found if len(found) > 1 else []

    def _try(self) -> None:
        try:
            with torch.inference_mode():
                least = self._difference(ONE_BY_ONE)
                if self._slots.index:
                    self._is_one_by_one = not self._is_equal_in_steps(least)
                else:
                    self._difference(STEPS)
        except Exception as error:  # transformers' code: anything may come
            has_states = any(own.num_states for own in self._kept)
            if (has_states or self._slots.index) and isinstance(error, ModelNotSupportedError):
                raise  # `because` names the states, which this way knows
            raise self._because from error

    def _is_equal_in_steps(self, least: float) -> bool:
        """Returns whether passes of several tokens continue from a state. least: the difference
        from transformers' logits that rounding alone causes, with one token at a time."""
        is_half = next(self._parts.decoder.parameters()).dtype.itemsize < 4
        try:
            difference = self._difference(STEPS)
        except ModelNotSupportedError:
            return False
        return difference <= max(ROUNDING_OF_HALF if is_half else ROUNDING, 3 * least)

    def _difference(self, steps: Sequence[int]) -> float:
        """Returns how far the logits are from transformers' when the tokens come in steps."""
        parts = self._parts
        return trial.check_equal(
            parts.name,
            parts.inner,
            parts.decoder,
            lambda ids: self._trial_logits(ids, steps),
            num_tokens=sum(steps),
            is_required=True,
        )

    def _run(
        self,
        attn: SequenceAttention,
        number: int,
        store: states.Store | None,
        *inputs: Any,
    ) -> Tensor:
        """Runs the decoder on the rows of one sequence, in as many passes as are exact. Returns
        [n, hidden]."""
        rows = attn.sequences[number]
        if not self._is_one_by_one or not rows.num_cached:
            return self._pass(attn, number, store, *inputs)
        single = pages.OneByOne(attn, number)
        found = []
        while single.has_next():
            found.append(self._pass(single, 0, store, *inputs))
        return torch.cat(found)

    def _pass(
        self,
        attn: SequenceAttention,
        number: int,
        store: states.Store | None,
        token_ids: Tensor,
        positions: Tensor,
        embeds: Tensor | None = None,
        inputs: ForwardInputs | None = None,
    ) -> Tensor:
        """Runs the decoder on the rows of one sequence. Returns [n, hidden]."""
        rows: SequenceRows = attn.sequences[number]
        own = slice(rows.start, rows.end)
        new = positions[..., own]
        cache = pages.sequence_cache(self._kept, self._places, attn, number, new)
        if isinstance(store, states.Rows):
            store.lend(cache)
        before = store.load() if store is not None and rows.num_cached else {}
        given: dict[str, Any] = {
            **self._carrier.arguments(cache, before),
            "position_ids": new.unsqueeze(-2) + self._parts.first_position,
            "use_cache": True,
            "return_dict": True,
        }
        if inputs is not None:
            given |= self._parts.features(inputs, rows.start, rows.end)
        if embeds is None and "input_ids" in self._accepted:
            given["input_ids"] = self._parts.embedded_ids(token_ids[own]).unsqueeze(0)
        else:
            if embeds is None:
                embeds = self._parts.embed(token_ids)
            given["inputs_embeds"] = embeds[own].unsqueeze(0)
            given |= self._parts.of_tokens(token_ids[own])
        given |= self._masks(cache, given, token_ids[own], inputs, own)
        out = self._parts.decoder(**{key: x for key, x in given.items() if key in self._accepted})
        if store is not None:
            store.save(self._carrier.states(cache, out))
        hidden: Tensor = out.last_hidden_state
        return hidden.squeeze(0)

    def _shared_pass(
        self,
        attn: SideBySideAttention,
        numbers: Sequence[int],
        store: states.Store | None,
        token_ids: Tensor,
        positions: Tensor,
        embeds: Tensor | None = None,
    ) -> Sequence[Tensor]:
        """Runs the decoder on one token of each of these sequences. Returns [1, n] of each."""
        rows = torch.tensor(
            [attn.sequences[number].start for number in numbers], device=token_ids.device
        )
        ids, new = token_ids[rows], positions[..., rows]
        cache = side_by_side.cache_of(self._kept, self._places, attn, numbers)
        if isinstance(store, states.Rows):
            store.lend(cache)
        before = {} if store is None else store.load()
        given: dict[str, Any] = {
            **self._carrier.arguments(cache, before),
            "position_ids": new.unsqueeze(-1) + self._parts.first_position,
            "use_cache": True,
            "return_dict": True,
        }
        if self._places.index:
            given["attention_mask"] = side_by_side.mask_of(attn, numbers, ids.device)
        if embeds is None and "input_ids" in self._accepted:
            given["input_ids"] = self._parts.embedded_ids(ids).unsqueeze(1)
        else:
            embeds = self._parts.embed(ids) if embeds is None else embeds[rows]
            given["inputs_embeds"] = embeds.unsqueeze(1)
            given |= self._parts.of_tokens(ids, axis=1)
        out = self._parts.decoder(**{key: x for key, x in given.items() if key in self._accepted})
        if store is not None:
            store.save(self._carrier.states(cache, out))
        hidden: Tensor = out.last_hidden_state
        return hidden.unbind(0)

    def _why_alone(self) -> str | None:
        """Returns why sequences of several lengths cannot share a pass; None where they get the
        same hidden states in one, by a trial."""
        if not side_by_side.can_hold(self._kept):
            return "its layers keep what counts tokens from the first of a sequence"
        if self._parts.name in masks.KNOWN:
            return "its masks are made for one sequence"
        is_half = next(self._parts.decoder.parameters()).dtype.itemsize < 4
        try:
            with torch.inference_mode():
                one, other = self._begun_trial(shares=False), self._begun_trial(shares=True)
                difference = float((one - other).float().norm() / one.float().norm())
        except Exception as error:  # transformers' code: anything may come
            return f"a trial failed ({type(error).__name__}: {error!s:.200})"
        if difference <= (ROUNDING_OF_HALF if is_half else ROUNDING):
            return None
        return f"hidden states differ by {difference:.2%} in a trial"

    def _begun_trial(self, *, shares: bool) -> Tensor:
        """Returns the hidden states [passes, sequences, n] of sequences that have begun alone."""
        parts = self._parts
        weight = parts.inner.get_input_embeddings().weight
        ids = trial.text_ids(parts.inner.config, weight, sum(BEGUN) + NUM_SHARED)
        memories = [trial.Memory() for _ in BEGUN]
        stores = [states.Remembered(self._slots) if self._slots.index else None for _ in BEGUN]
        for memory, store, length in zip(memories, stores, BEGUN, strict=True):
            memory.begin(0, length)
            self._pass(memory, 0, store, ids[:length], parts.count_up(0, length, ids.device))
        own = [store for store in stores if store is not None]
        both = states.SideBySideStores(own) if own else None
        found = []
        for step in range(NUM_SHARED):
            starts = [length + step for length in BEGUN]
            for memory, start in zip(memories, starts, strict=True):
                memory.begin(start, start + 1)
            new = ids[starts]
            positions = torch.cat([parts.count_up(n, n + 1, ids.device) for n in starts], -1)
            if shares:
                several, numbers = trial.Several(memories), range(len(BEGUN))
                hidden = self._shared_pass(several, numbers, both, new, positions)
            else:
                hidden = [
                    self._pass(memory, 0, store, new[n : n + 1], positions[..., n : n + 1])
                    for n, (memory, store) in enumerate(zip(memories, stores, strict=True))
                ]
            found.append(torch.cat(list(hidden)))
        return torch.stack(found)

    def _masks(
        self,
        cache: Any,
        given: Mapping[str, Any],
        ids: Tensor,
        inputs: ForwardInputs | None,
        own: slice,
    ) -> dict[str, Any]:
        """Returns the decoder's argument for masks, where it does not make them right by itself.
        inputs: None in a trial, all of whose tokens are of a prompt."""
        name, inner = self._parts.name, self._parts.inner
        in_prompt = torch.ones_like(ids, dtype=torch.bool)
        if inputs is not None:
            in_prompt = inputs.in_prompt[own]
        if name in masks.REFERENCES:
            return {"attention_mask": masks.of_reference(cache, self._parts.decoder, in_prompt)}
        if name not in masks.MARKERS or "inputs_embeds" not in given or inputs is None:
            return {}
        types = masks.types_of(name, inner.config, ids, in_prompt)
        embeds, positions = given["inputs_embeds"], given["position_ids"]
        return {"attention_mask": masks.make(inner, cache, embeds, positions, types)}

    def _trial_logits(self, ids: Tensor, steps: Sequence[int]) -> Tensor:
        """Returns the logits [N, vocab] of N tokens that come in steps."""
        parts, memory = self._parts, trial.Memory()
        store = states.Remembered(self._slots)
        found, end = [], 0
        for count in steps:
            start, end = end, end + count
            memory.begin(start, end)
            positions = parts.count_up(start, end, ids.device)
            found.append(self._pass(memory, 0, store, ids[start:end], positions))
        return parts.logits(torch.cat(found))
