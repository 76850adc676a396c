"""Runner.run: one StepPlan in, one StepResult out. It decides nothing; it computes what the plan
says."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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
from mmdeploy_llm.plan import NewRequest, RequestFailure, ScheduledTokens, StepPlan, StepResult
from mmdeploy_llm.sampling import Sampler, SampleResult, SlotRequest
from mmdeploy_llm.sampling.largest import first_argmax

from .ahead import Started
from .batch import Ints, StepBatch, prepare
from .checked import CheckedModel
from .encoder_cache import EncoderCache
from .graphs import DecodeGraphs, DecodeOutputs, Recorder
from .out_of_memory import PassSize, give_back_memory, is_out_of_memory
from .peers import NoPeers, Peers
from .prompt import asks_for_prompt, prompt_entries
from .slots import Slots
from .staging import DecodeFrame, StepTensors, to_device

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Collected:
    """What the step has come to so far."""

    sampled: dict[str, int] = field(default_factory=dict)
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[str, tuple[TokenLogprobs | None, ...]] = field(default_factory=dict)
    errors: dict[str, RequestFailure] = field(default_factory=dict)

    def take(self, other: _Collected) -> None:
        """Adds what a pass came to; prompt log-probabilities go behind those of earlier passes."""
        self.sampled.update(other.sampled)
        self.logprobs.update(other.logprobs)
        self.errors.update(other.errors)
        for request_id, entries in other.prompt_logprobs.items():
            before = self.prompt_logprobs.get(request_id, ())
            self.prompt_logprobs[request_id] = before + entries

    def result(self, plan: StepPlan) -> StepResult:
        """Of the whole step."""
        return StepResult(
            step_id=plan.step_id,
            sampled=self.sampled,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            errors=self.errors,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """What is sampled from: logits [N, V] of N items, their slots [N], tokens of their sequences
    after the step [N]. largest: what first_argmax gives of the logits, where it is known."""

    items: Sequence[ScheduledTokens]
    slots: Ints
    ends: Ints
    logits: Tensor
    largest: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launched:
    """A pass that the device was given; found: what the host has of it. sample: as
    DeviceSampler.launch gives it, where anything is sampled."""

    rows: _Rows | None
    sample: Any
    found: _Collected


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
        peers: Peers | None = None,
    ) -> None:
        """model_name: what messages call the model; None: its class. threads: None leaves them
        where the system puts them. peers: None where the model is not shared."""
        self._peers = peers or NoPeers()
        self._threads = threads
        name = model_name or type(model).__name__
        self._model = CheckedModel(model, name, sampler.vocab_size)
        self._backend = backend
        self._cache = cache
        self._sampler = sampler
        self._slots = slots
        self._device = device
        self._has_atomic_media = has_atomic_media
        self._encoder = EncoderCache(model, name, device, self._peers)
        self._has_mrope = model.positions(1, ()) is not None
        self._pass_size = PassSize(self._can_cut)
        self._graphs: DecodeGraphs | None = None
        # Of samplers that need not wait for the device (DeviceSampler).
        self._launch_sample: Callable[..., Any] | None = getattr(sampler, "launch", None)

    @property
    def can_run_ahead(self) -> bool:
        """See RunsAhead."""
        return self._launch_sample is not None

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Carries out the plan. A request that fails is in `errors`; the others are
        computed without it."""
        out = _Collected()
        scheduled = self._begin(plan, out)
        if scheduled:
            self._compute(scheduled, out)
        return out.result(plan)

    @torch.inference_mode()
    def start(self, plan: StepPlan, before: Started | None = None) -> Started:
        """See RunsAhead. What cannot be started in one pass is computed by `finish`."""
        out = _Collected()
        scheduled = self._begin(plan, out)
        launched = None
        is_whole = self._pass_size.most_tokens is None
        if scheduled and is_whole:
            launched = self._launched(scheduled, before)
        token_ids = self._next_inputs(plan, launched)
        return Started(
            plan=plan,
            finish=lambda: self._finish(plan, scheduled, launched, out, has_raised=is_whole),
            can_follow=token_ids is not None,
            token_ids=token_ids,
        )

    def _begin(self, plan: StepPlan, out: _Collected) -> list[ScheduledTokens]:
        """All of a plan before its tokens; what of them can be computed."""
        if self._threads is not None:
            self._threads.place()
        if self._device.index is not None and self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of this thread: kernels are launched there
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
        return scheduled

    def _launched(
        self, scheduled: Sequence[ScheduledTokens], before: Started | None
    ) -> _Launched | None:
        """One pass and its sampling, not waited for; None when it raised: then it is tried again
        when the step in front is finished, in smaller passes if need be."""
        found = _Collected()
        try:
            tokens = None if before is None else before.token_ids
            rows = self._logits(scheduled, found, tokens)
            sample = None
            if rows is not None and self._launch_sample is not None:
                sample = self._launch_sample(rows.logits, rows.slots, largest=rows.largest)
        except FAULTS as error:
            self._peers.raised(error)
            logger.debug("a step could not be started ahead: %s", error_text(error))
            return None
        return _Launched(rows=rows, sample=sample, found=found)

    def _next_inputs(self, plan: StepPlan, launched: _Launched | None) -> Tensor | None:
        """See Started.token_ids."""
        rows = launched.rows if launched is not None else None
        if rows is None or launched is None or len(rows.items) < len(plan.scheduled):
            return None
        sampler: Any = self._sampler
        return None if sampler.needs_host(rows.slots) else launched.sample.token_ids

    @torch.inference_mode()
    def _finish(
        self,
        plan: StepPlan,
        scheduled: Sequence[ScheduledTokens],
        launched: _Launched | None,
        out: _Collected,
        *,
        has_raised: bool,
    ) -> StepResult:
        """has_raised: what was not launched was tried."""
        if launched is not None:
            if launched.rows is not None:
                self._take(launched.rows, launched.sample.finish(), launched.found)
            out.take(launched.found)
        elif scheduled:
            self._compute(scheduled, out, is_again=has_raised)
        return out.result(plan)

    def _admit(self, new: NewRequest, out: _Collected) -> None:
        try:
            positions = self._positions(new)
            slot = self._slots.add(new, positions).index
            self._sampler.add(slot, _slot_request(new))
        except FAULTS as error:
            self._peers.raised(error)
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

    def _compute(
        self, scheduled: Sequence[ScheduledTokens], out: _Collected, *, is_again: bool = False
    ) -> None:
        """One forward pass, or several where memory is short; when one raises, smaller ones, so
        that only those at fault fail. is_again: one of them all has raised already."""
        for items in self._pass_size.passes(scheduled):
            self._pass(items, out, is_again=is_again)

    def _pass(
        self, scheduled: Sequence[ScheduledTokens], out: _Collected, *, is_again: bool
    ) -> None:
        if out.errors:  # of an earlier part of the same requests
            scheduled = [item for item in scheduled if item.request_id not in out.errors]
        error = self._error_of(scheduled, out, is_again=is_again) if scheduled else None
        if error is None:
            return
        # Here, not where it was caught: the exception held the tensors of the failed pass.
        parts: Sequence[Sequence[ScheduledTokens]] = ()
        if is_out_of_memory(error):
            give_back_memory(self._device)
            parts = self._pass_size.smaller(scheduled)
        elif len(scheduled) > 1:
            logger.warning("a step failed; its requests are tried one by one")
            parts = [[item] for item in scheduled]
        for items in parts or ():
            self._pass(items, out, is_again=True)
        if not parts:
            failure = self._alone(error)
            out.errors.update(dict.fromkeys((item.request_id for item in scheduled), failure))

    def _alone(self, error: BaseException) -> RequestFailure:
        """Why the only request of a pass failed."""
        if not is_out_of_memory(error):
            return _failure("the model failed on this request", error)
        said = error_text(error).partition(". ")[0].partition("\n")[0]
        message = (
            f"not even this request alone finds memory on {self._device} ({said}); shorten it, or "
            "lower gpu_memory_utilization or kv_cache_memory"
        )
        return RequestFailure(code=500, message=message)

    def _error_of(
        self, scheduled: Sequence[ScheduledTokens], out: _Collected, *, is_again: bool
    ) -> BaseException | None:
        """One forward pass, whose results are in `out` only when all of it worked; else why not."""
        found = _Collected()
        try:
            if is_again:
                self._reset_sampling(scheduled)
            self._forward_and_sample(scheduled, found)
        except FAULTS as error:
            self._peers.raised(error)
            if not is_out_of_memory(error):
                logger.warning("a forward pass failed", exc_info=True)
            return error.with_traceback(None)
        out.take(found)
        return None

    def _reset_sampling(self, scheduled: Sequence[ScheduledTokens]) -> None:
        """The sampler's slots as they were before a pass that raised, which may have drawn tokens
        on the device already: the next ones are drawn from the tokens that the host knows."""
        for item in scheduled:
            if item.samples:
                info = self._slots[item.request_id]
                known = self._slots.token_ids[info.index, : item.start + item.num_tokens]
                request = replace(info.request, token_ids=tuple(known.tolist()))
                self._sampler.remove(info.index)
                self._sampler.add(info.index, _slot_request(request))

    def _can_cut(self, item: ScheduledTokens) -> bool:
        """Whether the item's tokens may be computed in several passes."""
        if item.num_tokens == 1 or not self._has_atomic_media:
            return item.num_tokens > 1
        stop = item.start + item.num_tokens
        media = self._slots[item.request_id].media
        return not any(span.offset < stop and item.start < span.end for span in media)

    def _forward_and_sample(self, scheduled: Sequence[ScheduledTokens], out: _Collected) -> None:
        rows = self._logits(scheduled, out)
        if rows is not None:
            result = self._sampler.sample(rows.logits, rows.slots, largest=rows.largest)
            self._take(rows, result, out)

    def _logits(
        self,
        scheduled: Sequence[ScheduledTokens],
        out: _Collected,
        token_ids: Tensor | None = None,
    ) -> _Rows | None:
        """A forward pass: the rows to sample from, None when there are none. token_ids: the input
        of each item, where the host does not know it yet."""
        batch = prepare(
            scheduled,
            self._slots,
            self._cache.block_size,
            self._has_mrope,
            self._device,
            has_atomic_media=self._has_atomic_media,
            frame_for=self._graphs.frame_for if self._graphs else None,
        )
        if token_ids is not None:
            batch.token_ids[: len(token_ids)].copy_(token_ids)
        outputs = None
        if self._graphs is not None and batch.frame is not None:
            outputs = self._graphs.replay(batch.frame, len(scheduled))
        hidden = self._model.forward(self._inputs(batch)) if outputs is None else outputs.hidden
        self._report_prompt(batch, hidden, out)
        return self._rows(batch, hidden, outputs)

    def _decode(self, tensors: StepTensors) -> DecodeOutputs:
        """A decode pass as it is recorded: from inputs to the largest logits."""
        hidden = self._model.forward(
            ForwardInputs(
                token_ids=tensors.token_ids,
                positions=tensors.positions,
                in_prompt=tensors.in_prompt,
                has_prompt=False,  # DecodeGraphs.frame_for takes no others
                attn=self._backend.begin(tensors.layout, self._cache),
            )
        )
        logits = self._model.logits(hidden)
        token_ids, peaks = first_argmax(logits)
        return DecodeOutputs(hidden=hidden, logits=logits, token_ids=token_ids, peaks=peaks)

    @torch.inference_mode()
    def record_graphs(self, sizes: Sequence[int], recorder: Recorder) -> None:
        """Records decode steps of these sizes; where that cannot be, the log says why and all steps
        run without."""
        if not self._backend.can_capture:
            logger.warning(
                "no CUDA graphs, decoding is slower without: the attention backend %r cannot be "
                "recorded",
                self._backend.name,
            )
            return
        graphs = DecodeGraphs(recorder, self._peers)
        graphs.record(sizes, self._new_frame, self._decode)
        self._graphs = graphs if graphs.sizes else None

    def _new_frame(self, num_seqs: int) -> DecodeFrame:
        return DecodeFrame(
            num_seqs=num_seqs,
            num_blocks=self._slots.tables.shape[1],
            max_context=self._slots.token_ids.shape[1] - 1,
            has_mrope=self._has_mrope,
            device=self._device,
        )

    def _inputs(self, batch: StepBatch) -> ForwardInputs:
        rows, embeds = None, None
        if batch.media:
            pieces = batch.media
            (rows,) = to_device([np.concatenate([piece.rows for piece in pieces])], self._device)
            embeds = torch.cat([self._embeds(p.item.key)[p.begin : p.end] for p in pieces])
        return ForwardInputs(
            token_ids=batch.token_ids,
            positions=batch.positions,
            in_prompt=batch.in_prompt,
            has_prompt=batch.has_prompt,
            attn=self._backend.begin(batch.layout, self._cache),
            media_rows=rows,
            media_embeds=embeds,
        )

    def _embeds(self, key: str) -> Tensor:
        embeds = self._encoder.get(key)
        assert embeds is not None, "checked by _is_ready"
        return embeds

    def _rows(
        self, batch: StepBatch, hidden: Tensor, decoded: DecodeOutputs | None
    ) -> _Rows | None:
        """decoded: of a pass that computed the logits already, a row for each item."""
        chosen = [row for row, item in enumerate(batch.scheduled) if item.samples]
        if not chosen:
            return None
        items, ends = batch.scheduled, batch.ends
        last_rows, slots = batch.last_rows, batch.slots
        if len(chosen) < len(batch.scheduled):
            items = tuple(items[row] for row in chosen)
            last_rows, slots, ends = last_rows[chosen], slots[chosen], ends[chosen]
            decoded = None
        if decoded is not None:
            largest = decoded.token_ids, decoded.peaks
            return _Rows(
                items=items, slots=slots, ends=ends, logits=decoded.logits, largest=largest
            )
        if len(last_rows) < hidden.shape[0]:
            hidden = hidden[to_device([last_rows], self._device)[0]]
        return _Rows(items=items, slots=slots, ends=ends, logits=self._model.logits(hidden))

    def _take(self, rows: _Rows, result: SampleResult, out: _Collected) -> None:
        """The sampled tokens, into the slots and into `out`."""
        self._slots.append(rows.slots, rows.ends, result.token_ids)
        for row, item in enumerate(rows.items):
            if row in result.errors:
                message = result.errors[row]
                out.errors[item.request_id] = RequestFailure(code=500, message=message)
                continue
            out.sampled[item.request_id] = result.token_ids[row]
            logprobs = result.logprobs[row]
            if logprobs is not None:
                out.logprobs[item.request_id] = logprobs

    def _report_prompt(self, batch: StepBatch, hidden: Tensor, out: _Collected) -> None:
        """Log-probabilities of the prompt tokens of this step, for the requests that asked
        for them."""
        for item, last_row in zip(batch.scheduled, batch.last_rows.tolist(), strict=True):
            request = self._slots[item.request_id].request
            if asks_for_prompt(request, item):
                own = hidden[last_row + 1 - item.num_tokens : last_row + 1]
                entries = prompt_entries(request, item, own, self._model.logits)
                out.prompt_logprobs[item.request_id] = entries

    def close(self) -> None:
        """See Executor. Everything goes with the object."""


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
