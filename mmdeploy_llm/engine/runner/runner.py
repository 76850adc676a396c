"""Runner: computes step plans, one StepPlan in, one StepResult out. It makes no decisions.

start    free slots, admit requests, encode media; launch the pass where steps may overlap
finish   wait for the sampled tokens, or compute the passes that were not launched
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdeploy_llm.engine.runner.sampling.results import PendingSample
from mmdeploy_llm.engine.runner.sampling.sampler import Sampler
from mmdeploy_llm.engine.runner.sampling.state import SlotRequest
from mmdeploy_llm.hooks import Model
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.hooks.objects.attention import AttentionBackend, AttentionKernels, KVCache
from mmdeploy_llm.hooks.records import FAULTS
from mmdeploy_llm.kernels.cpu import ComputeThreads
from mmdeploy_llm.layers.adapters.attached.served import ServedAdapters
from mmdeploy_llm.layers.pooling.abilities import has_whole_prompts
from mmdeploy_llm.layers.pooling.pooler import Pooler
from mmdeploy_llm.layers.pooling.rules import NO_RULES, EmbeddingRules
from mmdeploy_llm.system.sharding.peers import NoPeers, Peers
from mmdeploy_llm.values.plan import (
    NewRequest,
    RequestFailure,
    ScheduledTokens,
    StepPlan,
    StepResult,
)

from .answer_attention import AnswerAttention
from .checked import CheckedModel
from .drafter import Drafter
from .drafts import SampleRows, sample_drafts
from .encoder_cache import EncoderCache
from .executor import Started
from .forward_pass import ForwardPass
from .graphs import Recorder
from .outcome import StepOutcome, failure_of
from .retry import Retry
from .slots import Slots
from .states import StateTable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedPass:
    """A forward pass and its sampling, which may still run on the device. outcome: its results as
    far as the host has them. rows, sample: None when no item samples."""

    outcome: StepOutcome
    rows: SampleRows | None
    sample: PendingSample | None


class Runner:
    """Runs step plans in this process. Holds the model, the caches and the slots of running
    requests; nothing else writes to them. See Executor for the methods."""

    def __init__(
        self,
        *,
        model: Model,
        backend: AttentionBackend,
        cache: KVCache,
        sampler: Sampler,
        slots: Slots,
        device: torch.device,
        has_atomic_media: bool = False,
        model_name: str | None = None,
        threads: ComputeThreads | None = None,
        peers: Peers | None = None,
        states: StateTable | None = None,
        adapters: ServedAdapters | None = None,
        rules: EmbeddingRules = NO_RULES,
        kernels: AttentionKernels | None = None,
    ) -> None:
        """model_name: the model in messages; None: the name of its class. threads: None leaves
        them to the system. peers, adapters: None: there are none. states: None for a model without.
        rules: of vectors and scores. kernels: of cross attention; None where torch computes it."""
        self._peers, self._sampler, self._slots = peers or NoPeers(), sampler, slots
        self._threads, self._device, self._has_atomic_media = threads, device, has_atomic_media
        name = model_name or type(model).__name__
        self._model = CheckedModel(model, name, sampler.vocab_size)
        self._adapters = adapters or ServedAdapters(model, device)
        self._pooler = Pooler(model, name, rules, self._adapters.step.of_rows)
        self._encoder = EncoderCache(model, name, device, self._peers, self._adapters)
        own = getattr(model, "answer_attention", None)
        self._attention = AnswerAttention(slots, self._encoder, device, own)
        parts = self._model, backend, cache, slots, self._encoder, self._peers
        self._drafter = Drafter(*parts) if self._model.has_draft_head else None
        self._forward = ForwardPass(
            model=self._model,
            backend=backend,
            cache=cache,
            slots=slots,
            encoder=self._encoder,
            has_atomic_media=has_atomic_media,
            peers=self._peers,
            adapters=self._adapters,
            pooler=self._pooler,
            attention=self._attention,
            states=states,
            drafter=self._drafter,
            kernels=kernels,
        )
        self._is_whole = states is not None or has_whole_prompts(model)
        self._retry = Retry(device=device, peers=self._peers)

    @property
    def can_overlap(self) -> bool:
        """Whether the sampler returns before the device has computed the tokens."""
        return self._sampler.can_overlap

    def run(self, plan: StepPlan) -> StepResult:
        """Starts a step and finishes it; see Executor."""
        return self.start(plan).finish()

    @torch.inference_mode()
    def start(self, plan: StepPlan, before: Started | None = None) -> Started:
        """Starts a step; see Executor. A request that fails is in `errors` of the result; the
        others are computed without it. Where steps cannot overlap, or need several passes, `finish`
        computes them."""
        outcome = StepOutcome()
        scheduled = self._begin(plan, outcome)
        if self._drafter is not None and self._drafter.is_ready(scheduled):
            self._adapters.step.set_all()
            scheduled = self._drafter.guess(scheduled, knows_last=before is None)
        can_launch = bool(scheduled) and self.can_overlap and self._retry.is_one_pass
        if any(item.drafts for item in scheduled):
            self._slots.write_drafts(scheduled)
            can_launch = False  # each token must be known before the next is sampled
        launched = self._try_launch(scheduled, before) if can_launch else None
        token_ids = self._next_inputs(plan, launched)
        return Started(
            plan=plan,
            finish=lambda: self._finish(plan, scheduled, launched, outcome, has_raised=can_launch),
            can_follow=token_ids is not None,
            token_ids=token_ids,
        )

    def close(self) -> None:
        """Does nothing: memory is freed with the object."""

    def record_graphs(self, sizes: Sequence[int], recorder: Recorder) -> None:
        """Records decode steps of these sizes; see ForwardPass."""
        self._forward.record_graphs(sizes, recorder)

    @torch.inference_mode()
    def _finish(
        self,
        plan: StepPlan,
        scheduled: Sequence[ScheduledTokens],
        launched: LaunchedPass | None,
        outcome: StepOutcome,
        *,
        has_raised: bool,
    ) -> StepResult:
        """Returns the result of a step. launched: None when nothing is in flight; has_raised then
        says whether the launch was attempted and failed."""
        if launched is not None:
            outcome.merge(self._collect(launched))
        elif scheduled:
            self._retry.run(self, scheduled, outcome, has_raised=has_raised)
        return outcome.result(plan)

    def _begin(self, plan: StepPlan, outcome: StepOutcome) -> list[ScheduledTokens]:
        """Carries out everything in a plan that precedes its tokens; returns the items that can be
        computed."""
        if self._threads is not None:
            self._threads.place()
        if self._device.index is not None and self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # per thread: it launches kernels on this device
        for request_id in plan.drop:
            self._pooler.drop(request_id)
            self._attention.drop(request_id)
            slot = self._slots.drop(request_id)
            if slot is not None:
                self._sampler.remove(slot)
        self._encoder.forget(plan.forget)
        self._adapters.unload(plan.unload)
        self._adapters.load(plan.load, self._peers.raised)
        for new in plan.new:
            self._admit(new, outcome)
        if plan.encode:
            self._encoder.encode(plan.encode)
        scheduled = [item for item in plan.scheduled if self._is_ready(item, outcome)]
        self._slots.extend_tables(scheduled)
        return scheduled

    def _admit(self, new: NewRequest, outcome: StepOutcome) -> None:
        try:
            if new.adapter:
                self._adapters.check(new.adapter)
            positions = self._positions(new)
            slot = self._slots.add(new, positions).index
            if self._drafter is not None:
                self._drafter.admit(slot, has_guesses=new.has_guesses)
            if new.wanted is None:
                self._sampler.add(slot, _slot_request(new))
        except FAULTS as error:
            self._peers.raised(error)
            logger.warning("a request could not start", exc_info=True)
            outcome.errors[new.request_id] = failure_of("the request could not start", error)

    def _positions(self, new: NewRequest) -> NDArray[np.int64] | None:
        """Returns M-RoPE positions [axes, prompt_len] of a prompt with media; None for others."""
        if not self._model.num_axes or not new.media:
            return None
        positions = self._model.positions(new.token_ids[: new.prompt_len], new.media)
        return None if positions is None else positions.cpu().numpy()

    def _is_ready(self, item: ScheduledTokens, outcome: StepOutcome) -> bool:
        """Whether the request has a slot and every media item that this step touches was encoded;
        otherwise the request fails."""
        if item.request_id in outcome.errors or item.request_id not in self._slots:
            return False
        for span in self._slots[item.request_id].media_in(item):
            if self._encoder.get(span.item.key) is None:
                reason = self._encoder.failure(span.item.key)
                outcome.errors[item.request_id] = RequestFailure(code=500, message=reason)
                return False
        return True

    def _try_launch(
        self, scheduled: Sequence[ScheduledTokens], before: Started | None
    ) -> LaunchedPass | None:
        """Launches the step in one pass. Returns None when that raised: `finish` then retries it,
        after the previous step has freed its memory."""
        try:
            return self._launch(scheduled, None if before is None else before.token_ids)
        except FAULTS as error:
            self._peers.raised(error)
            logger.debug("a step could not be launched: %s", error_text(error))
            return None

    def _launch(
        self, scheduled: Sequence[ScheduledTokens], token_ids: Tensor | None = None
    ) -> LaunchedPass:
        """Launches one forward pass and its sampling. token_ids: see ForwardPass.compute."""
        outcome = StepOutcome()
        rows = self._forward.compute(scheduled, outcome, token_ids)
        sample = None
        if rows is not None:
            logits = rows.logits[: len(rows.slots)]
            sample = self._sampler.launch(logits, rows.slots, largest=rows.largest)
        return LaunchedPass(outcome=outcome, rows=rows, sample=sample)

    def _next_inputs(self, plan: StepPlan, launched: LaunchedPass | None) -> Tensor | None:
        """Returns Started.token_ids; None when the next step must wait for the host."""
        if launched is None or launched.rows is None or launched.sample is None:
            return None
        if len(launched.rows.items) < len(plan.scheduled):
            return None
        needs_host = self._sampler.needs_host(launched.rows.slots)
        return None if needs_host else launched.sample.token_ids

    def _collect(self, launched: LaunchedPass) -> StepOutcome:
        """Waits for a pass; returns its results and writes the sampled tokens into the slots."""
        outcome, rows = launched.outcome, launched.rows
        if rows is None or launched.sample is None:
            return outcome
        result = launched.sample.finish()
        self._slots.append(rows.slots, rows.ends, result.token_ids)
        for row, item in enumerate(rows.items):
            if row in result.errors:
                code, message = 400 if row in result.unmet else 500, result.errors[row]
                outcome.errors[item.request_id] = RequestFailure(code=code, message=message)
                continue
            outcome.sampled[item.request_id] = result.token_ids[row]
            if row in result.certain:
                outcome.certain.add((item.request_id, 0))
            if (logprobs := result.logprobs[row]) is not None:
                outcome.logprobs[item.request_id] = (logprobs,)
        if rows.drafts is not None:
            sample_drafts(self._sampler, self._slots, rows, rows.drafts, outcome)
        if self._slots.num_watched:
            self._attention.add(rows, outcome)
        return outcome

    def compute(self, items: Sequence[ScheduledTokens]) -> StepOutcome:
        """Runs one forward pass and samples; see Passes."""
        return self._collect(self._launch(items))

    def reset(self, item: ScheduledTokens) -> None:
        """Sets the sampler's slot back to its state before a pass that raised, which may have drawn
        a token on the device already: the next one follows the tokens that the host knows."""
        info = self._slots[item.request_id]
        end = item.start + item.num_tokens - len(item.drafts)
        known = self._slots.token_ids[info.index, :end]
        request = replace(info.request, token_ids=tuple(known.tolist()))
        self._sampler.remove(info.index)
        self._sampler.add(info.index, _slot_request(request))

    def can_split(self, item: ScheduledTokens) -> bool:
        """Whether the item's tokens may be computed in several passes."""
        if item.num_tokens == 1 or item.drafts or self._is_whole:  # states are written at its end
            return False
        return not (self._has_atomic_media and self._slots[item.request_id].media_in(item))


def _slot_request(new: NewRequest) -> SlotRequest:
    return SlotRequest(
        params=new.params,
        prompt_token_ids=new.token_ids[: new.prompt_len],
        output_token_ids=new.token_ids[new.prompt_len :],
        eos_token_ids=new.eos_token_ids,
        bad_words_token_ids=new.bad_words_token_ids,
        reasoning_end_ids=new.reasoning_end_ids,
        prompt_text=new.prompt_text,
    )
