"""Runner.run: one StepPlan in, one StepResult out. It decides nothing; it computes what the plan
says."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mmdeploy_llm.attention.base import AttentionBackend, KVCache
from mmdeploy_llm.errors import MMDeployLLMError
from mmdeploy_llm.forward import ForwardInputs
from mmdeploy_llm.hooks import Model
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.hooks.records import FAULTS
from mmdeploy_llm.native import ComputeThreads
from mmdeploy_llm.outputs import TokenLogprobs
from mmdeploy_llm.params import SamplingParams
from mmdeploy_llm.plan import NewRequest, RequestFailure, ScheduledTokens, StepPlan, StepResult
from mmdeploy_llm.sampling import Sampler, SlotRequest, prompt_logprobs

from .batch import StepBatch, prepare
from .checked import CheckedModel
from .encoder_cache import EncoderCache
from .slots import Slots

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Collected:
    """What the step has come to so far."""

    sampled: dict[str, int] = field(default_factory=dict)
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[str, tuple[TokenLogprobs | None, ...]] = field(default_factory=dict)
    errors: dict[str, RequestFailure] = field(default_factory=dict)


class Runner:
    """Holds the model, the caches and the slots of running requests; nothing else writes to
    them."""

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
    ) -> None:
        """model_name: what messages call the model; None: its class. threads: None leaves them
        where the system puts them."""
        self._threads = threads
        name = model_name or type(model).__name__
        self._model = CheckedModel(model, name, sampler.vocab_size)
        self._backend = backend
        self._cache = cache
        self._sampler = sampler
        self._slots = slots
        self._device = device
        self._has_atomic_media = has_atomic_media
        self._encoder = EncoderCache(model, name)
        self._has_mrope = model.positions(1, ()) is not None

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Carries out the plan. A request that fails is in `errors`; the others are
        computed without it."""
        if self._threads is not None:
            self._threads.place()
        out = _Collected()
        for request_id in plan.drop:
            slot = self._slots.drop(request_id)
            if slot is not None:
                self._sampler.remove(slot)
        self._encoder.forget(plan.forget)
        for new in plan.new:
            self._admit(new, out)
        self._encoder.encode(plan.encode)
        scheduled = [item for item in plan.scheduled if self._is_ready(item, out)]
        self._slots.extend_tables(scheduled)
        if scheduled:
            self._compute(scheduled, out)
        return StepResult(
            step_id=plan.step_id,
            sampled=out.sampled,
            logprobs=out.logprobs,
            prompt_logprobs=out.prompt_logprobs,
            errors=out.errors,
        )

    def _admit(self, new: NewRequest, out: _Collected) -> None:
        try:
            positions = self._positions(new)
            slot = self._slots.add(new, positions).index
            self._sampler.add(slot, _slot_request(new))
        except FAULTS as error:
            logger.warning("a request could not start", exc_info=True)
            out.errors[new.request_id] = _failure("the request could not start", error)

    def _positions(self, new: NewRequest) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]] | None:
        if not self._has_mrope or not new.media:
            return None
        # Checked before the request has a slot.
        positions = self._model.positions(new.prompt_len, new.media)
        return None if positions is None else positions.cpu().numpy()

    def _is_ready(self, item: ScheduledTokens, out: _Collected) -> bool:
        """Whether the request started and every media item that this step touches was encoded."""
        if item.request_id in out.errors or item.request_id not in self._slots:
            return False
        stop = item.start + item.num_tokens
        for span in self._slots[item.request_id].media:
            is_touched = span.offset < stop and item.start < span.end
            if is_touched and self._encoder.get(span.item.key) is None:
                reason = self._encoder.failure(span.item.key)
                out.errors[item.request_id] = RequestFailure(code=500, message=reason)
                return False
        return True

    def _compute(self, scheduled: Sequence[ScheduledTokens], out: _Collected) -> None:
        """One forward pass; when it raises, one for each request, so that only those at
        fault fail."""
        try:
            self._forward_and_sample(scheduled, out)
        except FAULTS as error:
            if len(scheduled) == 1:
                logger.warning("the model failed on a request", exc_info=True)
                failure = _failure("the model failed on this request", error)
                out.errors[scheduled[0].request_id] = failure
                return
            logger.warning("a step failed; its requests are tried one by one", exc_info=True)
            for item in scheduled:
                self._compute([item], out)

    def _forward_and_sample(self, scheduled: Sequence[ScheduledTokens], out: _Collected) -> None:
        batch = prepare(
            scheduled,
            self._slots,
            self._cache.block_size,
            self._has_mrope,
            self._device,
            has_atomic_media=self._has_atomic_media,
        )
        hidden = self._model.forward(self._inputs(batch))
        self._report_prompt(batch, hidden, out)
        self._sample(batch, hidden, out)

    def _inputs(self, batch: StepBatch) -> ForwardInputs:
        rows, embeds = None, None
        if batch.media:
            pieces = batch.media
            rows = torch.from_numpy(np.concatenate([piece.rows for piece in pieces]))
            rows = rows.to(self._device)
            embeds = torch.cat([self._embeds(p.item.key)[p.begin : p.end] for p in pieces])
        return ForwardInputs(
            token_ids=batch.token_ids,
            positions=batch.positions,
            in_prompt=batch.in_prompt,
            attn=self._backend.begin(batch.layout, self._cache),
            media_rows=rows,
            media_embeds=embeds,
        )

    def _embeds(self, key: str) -> Tensor:
        embeds = self._encoder.get(key)
        assert embeds is not None, "checked by _is_ready"
        return embeds

    def _sample(self, batch: StepBatch, hidden: Tensor, out: _Collected) -> None:
        chosen = [row for row, item in enumerate(batch.scheduled) if item.samples]
        if not chosen:
            return
        last_rows, slots = batch.last_rows, batch.slots
        if len(chosen) < len(batch.scheduled):
            last_rows, slots = last_rows[chosen], slots[chosen]
        if len(last_rows) < hidden.shape[0]:
            hidden = hidden[torch.from_numpy(last_rows).to(hidden.device)]
        result = self._sampler.sample(self._model.logits(hidden), slots)
        self._slots.append(slots, batch.ends[chosen], result.token_ids)
        for row, place in enumerate(chosen):
            request_id = batch.scheduled[place].request_id
            if row in result.errors:
                message = result.errors[row]
                out.errors[request_id] = RequestFailure(code=500, message=message)
                continue
            out.sampled[request_id] = result.token_ids[row]
            logprobs = result.logprobs[row]
            if logprobs is not None:
                out.logprobs[request_id] = logprobs

    def _report_prompt(self, batch: StepBatch, hidden: Tensor, out: _Collected) -> None:
        """Log-probabilities of the prompt tokens of this step, for the requests that asked
        for them."""
        for item, last_row in zip(batch.scheduled, batch.last_rows.tolist(), strict=True):
            request = self._slots[item.request_id].request
            count = request.params.prompt_logprobs
            if count is None or item.start >= request.prompt_len:
                continue
            first_row = last_row + 1 - item.num_tokens
            # The logits at token i speak of token i + 1; the prompt's first token has none.
            num_next = min(item.num_tokens, request.prompt_len - 1 - item.start)
            entries: tuple[TokenLogprobs | None, ...] = (None,) if item.start == 0 else ()
            if num_next > 0:
                logits = self._model.logits(hidden[first_row : first_row + num_next])
                following = request.token_ids[item.start + 1 : item.start + 1 + num_next]
                entries += prompt_logprobs(logits, torch.tensor(following), count)
            out.prompt_logprobs[item.request_id] = entries

    def warm_up(self, num_tokens: int) -> None:
        """One small prefill and one decode step on a request of its own, so that the first
        real one finds kernels and buffers ready. Uses block 0, before any request has it."""
        count = max(1, min(num_tokens, self._cache.block_size - 1))
        params = SamplingParams(
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            max_tokens=2,
            seed=0,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
        )
        new = NewRequest(
            request_id="warm-up",
            token_ids=(0,) * count,
            prompt_len=count,
            params=params,
            eos_token_ids=frozenset(),
        )
        prefill = ScheduledTokens(
            request_id="warm-up", start=0, num_tokens=count, new_block_ids=(0,)
        )
        result = self.run(StepPlan(step_id=-2, new=(new,), scheduled=(prefill,)))
        if not result.errors:
            decode = ScheduledTokens(request_id="warm-up", start=count, num_tokens=1)
            result = self.run(StepPlan(step_id=-1, scheduled=(decode,)))
        self.run(StepPlan(step_id=0, drop=("warm-up",)))
        for failure in result.errors.values():
            logger.warning("the warm-up step failed: %s", failure.message)


def _slot_request(new: NewRequest) -> SlotRequest:
    return SlotRequest(
        params=new.params,
        prompt_token_ids=new.token_ids[: new.prompt_len],
        output_token_ids=new.token_ids[new.prompt_len :],
        eos_token_ids=new.eos_token_ids,
        bad_words_token_ids=new.bad_words_token_ids,
        reasoning_end_ids=new.reasoning_end_ids,
    )


def _failure(what: str, error: BaseException) -> RequestFailure:
    code = error.code if isinstance(error, MMDeployLLMError) else 500
    return RequestFailure(code=code, message=f"{what}: {error_text(error)}")
