"""ForwardPass: from scheduled tokens to the logits that the step samples from.

scheduled --prepare--> tensors --model.forward--> hidden [T, hidden] --> last token of each item
                          |                                                  | model.logits
                          +-- recorded decode step (graphs.py) --------------+--> logits [N, V]
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmdeploy_llm.engine.runner.sampling.largest import first_argmax
from mmdeploy_llm.engine.runner.sampling.logprobs import prompt_entries, wants_prompt_logprobs
from mmdeploy_llm.forward import ForwardInputs
from mmdeploy_llm.hooks.objects.attention import AttentionBackend, AttentionKernels, KVCache
from mmdeploy_llm.layers.adapters.attached.served import ServedAdapters
from mmdeploy_llm.layers.attention.cross import CrossItems, CrossRequest, JoinedItems, WatchedRows
from mmdeploy_llm.layers.pooling.pooler import Pooler
from mmdeploy_llm.layers.transfer import to_device
from mmdeploy_llm.system.sharding.peers import Peers
from mmdeploy_llm.values.plan import ScheduledTokens

from .answer_attention import AnswerAttention
from .batch import StepBatch, prepare, spans_of_items, spans_of_prompts
from .checked import CheckedModel
from .drafter import Drafter
from .drafts import DraftRows, SampleRows
from .encoder_cache import EncoderCache
from .graphs import DecodeGraphs, DecodeOutputs, Recorder
from .outcome import StepOutcome
from .slots import Slots
from .states import StateTable, StepStates
from .step_inputs import DecodeFrame, StepTensors
from .vectors import add_vectors, token_types

logger = logging.getLogger(__name__)


class ForwardPass:
    """Runs the model for one runner, its only user: with new kernel launches, or by replaying a
    recorded decode step that fits."""

    def __init__(
        self,
        *,
        model: CheckedModel,
        backend: AttentionBackend,
        cache: KVCache,
        slots: Slots,
        encoder: EncoderCache,
        has_atomic_media: bool,
        peers: Peers,
        adapters: ServedAdapters,
        pooler: Pooler,
        attention: AnswerAttention,
        states: StateTable | None = None,
        drafter: Drafter | None = None,
        kernels: AttentionKernels | None = None,
    ) -> None:
        """states: None for a model whose layers keep none. drafter: None for one without a draft
        head. kernels: of cross attention; None where torch computes it."""
        self._drafter = drafter
        self._pooler, self._has_cross = pooler, model.has_cross
        self._states, self._adapters, self._attention = states, adapters, attention
        self._model = model
        self._backend = backend
        self._cache = cache
        self._slots = slots
        self._encoder, self._joined, self._kernels = encoder, JoinedItems(), kernels
        self._device = cache.keys[0].device
        self._num_axes = model.num_axes
        own = spans_of_prompts if model.sees_prompts else spans_of_items
        self._spans_of = own if has_atomic_media else None
        self._peers = peers
        self._graphs: DecodeGraphs | None = None

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Rows of each recorded decode step, ascending."""
        return self._graphs.sizes if self._graphs else ()

    def compute(
        self,
        scheduled: Sequence[ScheduledTokens],
        outcome: StepOutcome,
        token_ids: Tensor | None = None,
    ) -> SampleRows | None:
        """Computes the items and returns the rows to sample from; None when no item samples. Writes
        prompt log-probabilities into `outcome`.

        token_ids: the input token of each item, on the device, where the host does not know it yet.
        """
        keys = [self._slots[item.request_id].request.adapter for item in scheduled]
        adapters = self._adapters.begin([item.num_tokens for item in scheduled], keys)
        batch = prepare(
            scheduled,
            self._slots,
            self._cache.block_size,
            self._num_axes,
            self._device,
            spans_of=self._spans_of,
            frame_for=self._graphs.frame_for if self._graphs and adapters is None else None,
        )
        if token_ids is not None:
            batch.tensors.token_ids[: len(token_ids)].copy_(token_ids)
        replayed = None
        if self._graphs is not None and batch.frame is not None:
            self._decode_states(batch.frame.num_seqs, scheduled)
            replayed = self._graphs.replay(batch.frame, len(scheduled))
        if replayed is None:
            watched = self._attention.watched(scheduled) if self._slots.num_watched else None
            inputs = replace(self._inputs(batch, watched), adapters=adapters)
            hidden = self._model.forward(inputs)
            if watched is not None:
                self._attention.keep(scheduled, watched)
        else:
            hidden = replayed.hidden
        self._add_prompt_logprobs(batch, hidden, outcome)
        if self._slots.num_wanting:
            add_vectors(scheduled, batch.last_rows, self._slots, self._pooler, hidden, outcome)
        rows = self._sample_rows(batch, hidden, replayed)
        if self._drafter is not None and self._drafter.is_ready(scheduled):
            self._adapters.step.set_all()
            self._drafter.keep(batch, hidden)  # last: it may overwrite the hidden states
        return rows

    @torch.inference_mode()
    def record_graphs(self, sizes: Sequence[int], recorder: Recorder) -> None:
        """Records decode steps of these sizes. Where that is impossible, logs why, and all steps
        run without recordings."""
        if not self._backend.can_capture or self._has_cross:
            logger.warning(
                "no CUDA graphs, decoding is slower without: %s cannot be recorded",
                "cross attention"
                if self._has_cross
                else f"the attention backend {self._backend.name!r}",
            )
            return
        graphs = DecodeGraphs(recorder, self._peers)
        graphs.record(sizes, self._new_frame, self._decode)
        self._graphs = graphs if graphs.sizes else None

    def _new_frame(self, num_seqs: int) -> DecodeFrame:
        return DecodeFrame(
            num_seqs=num_seqs,
            num_blocks=self._slots.tables[0].ids.shape[1],
            max_context=self._slots.token_ids.shape[1] - 1,
            num_axes=self._num_axes,
            device=self._device,
            has_windows=len(self._slots.tables) > 1,
            has_long=self._slots.is_long is not None,
        )

    def _decode(self, tensors: StepTensors) -> DecodeOutputs:
        """Computes a decode step as it is recorded: from its inputs to the largest logits."""
        hidden = self._model.forward(
            ForwardInputs(
                token_ids=tensors.token_ids,
                positions=tensors.positions,
                in_prompt=tensors.in_prompt,
                has_prompt=False,  # DecodeGraphs.frame_for refuses steps with prompt tokens
                attn=self._backend.begin(tensors.layout, self._cache),
                states=self._decode_states(tensors.token_ids.shape[0], ()),
                is_long=tensors.is_long,
            )
        )
        logits = self._model.logits(hidden)
        token_ids, peaks = first_argmax(logits)
        return DecodeOutputs(hidden=hidden, logits=logits, token_ids=token_ids, peaks=peaks)

    def _inputs(self, batch: StepBatch, watched: WatchedRows | None) -> ForwardInputs:
        rows, embeds = None, None
        if batch.media:
            rows, embeds = batch.media_inputs(self._encoder.needed, self._device)
        token_ids, positions, in_prompt, layout, is_long = batch.tensors
        return ForwardInputs(
            token_ids=token_ids,
            positions=positions,
            in_prompt=in_prompt,
            has_prompt=batch.has_prompt,
            attn=self._backend.begin(layout, self._cache),
            media_rows=rows,
            media_embeds=embeds,
            states=None if self._states is None else self._states.step(batch.scheduled),
            is_long=is_long,
            token_types=token_types(batch.scheduled, self._slots, self._device),
            cross=self._cross_items(batch, watched) if self._has_cross else None,
        )

    def _cross_items(self, batch: StepBatch, watched: WatchedRows | None) -> CrossItems:
        """Returns the keys and values that each request's tokens have of an encoder's item."""
        rows = [
            CrossRequest(
                first=item.start, count=item.num_tokens, media=self._slots[item.request_id].media
            )
            for item in batch.scheduled
        ]
        return CrossItems(rows, self._encoder.needed, self._joined, self._kernels, watched)

    def _decode_states(
        self, num_rows: int, scheduled: Sequence[ScheduledTokens]
    ) -> StepStates | None:
        """Writes the state rows of a recorded decode step, and padding, to its fixed addresses."""
        return None if self._states is None else self._states.decode(num_rows, scheduled)

    def _sample_rows(
        self, batch: StepBatch, hidden: Tensor, replayed: DecodeOutputs | None
    ) -> SampleRows | None:
        """Returns the rows to sample from; None when no item samples. replayed: outputs of a
        recorded step, which hold the logits of each item already."""
        chosen = [row for row, item in enumerate(batch.scheduled) if item.samples]
        if not chosen:
            return None
        items, ends = batch.scheduled, batch.ends
        last_rows, slots = batch.last_rows, batch.slots
        if len(chosen) < len(batch.scheduled):
            items = tuple(items[row] for row in chosen)
            last_rows, slots, ends = last_rows[chosen], slots[chosen], ends[chosen]
            replayed = None
        if replayed is not None:
            largest = replayed.token_ids, replayed.peaks
            return SampleRows(
                items=items, slots=slots, ends=ends, logits=replayed.logits, largest=largest
            )
        drafts = DraftRows.of(items) if any(item.drafts for item in items) else None
        if drafts is not None:
            last_rows, ends = drafts.rows_after(last_rows), ends - drafts.counts
        if len(last_rows) < hidden.shape[0] or drafts is not None:
            hidden = hidden[to_device(last_rows, self._device)]
        with self._adapters.step.of_rows(torch.from_numpy(last_rows)):
            logits = self._model.logits(hidden)
        return SampleRows(items=items, slots=slots, ends=ends, logits=logits, drafts=drafts)

    def _add_prompt_logprobs(self, batch: StepBatch, hidden: Tensor, outcome: StepOutcome) -> None:
        """Adds entries for the prompt tokens of this pass, for requests that want them."""
        for item, last_row in zip(batch.scheduled, batch.last_rows.tolist(), strict=True):
            request = self._slots[item.request_id].request
            if wants_prompt_logprobs(request, item):
                own = slice(last_row + 1 - item.num_tokens, last_row + 1)
                of_rows, logits_of = self._adapters.step.of_rows, self._model.logits
                with of_rows(own):
                    entries = prompt_entries(request, item, hidden[own], logits_of, of_rows)
                outcome.prompt_logprobs[item.request_id] = entries
