"""Prepares one forward pass: from scheduled tokens to its arrays and tensors.

slots      0: [a a a a a a a . .]     1: [b b b b b .]
scheduled  request a: 4 .. 7          request b: 4 .. 5
step       slots   [1 | 0 0 0]        decode first
           offsets [4 | 4 5 6]        index of each token in its own sequence
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdeploy_llm.hooks.objects.attention import BatchLayout, StepLengths
from mmdeploy_llm.layers.transfer import to_device, to_device_together
from mmdeploy_llm.request import MediaInput, MediaSpan
from mmdeploy_llm.values.plan import ScheduledTokens

from .slots import BlockTables, Slots
from .step_inputs import DecodeFrame, Paging, StepArrays, StepTensors

Ints = NDArray[np.int64]
Spans = tuple[tuple[int, int, int], ...]
SpansOf = Callable[[Sequence[ScheduledTokens], Slots], Spans]


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPiece:
    """Embeddings begin..end of one media item, which replace the token embeddings of `rows`."""

    item: MediaInput
    begin: int
    end: int
    rows: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """One forward pass. T tokens of B scheduled items, in the plan's order.

    tensors: the inputs on the device. has_prompt: whether any of in_prompt is True.
    slots: [B] slot of each item.
    last_rows: [B] row of each item's last token.
    ends: [B] tokens of each sequence after the step.
    frame: the recorded decode step that owns the tensors, which then end with rows of padding;
        None when the pass has tensors of its own.
    """

    scheduled: tuple[ScheduledTokens, ...]
    tensors: StepTensors
    has_prompt: bool
    slots: Ints
    last_rows: Ints
    ends: Ints
    media: tuple[MediaPiece, ...]
    frame: DecodeFrame | None = None

    def media_inputs(
        self, embeds: Callable[[str], Tensor], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Returns ForwardInputs.media_rows and media_embeds. embeds: of an item by its key."""
        rows = to_device(np.concatenate([piece.rows for piece in self.media]), device)
        return rows, torch.cat([embeds(p.item.key)[p.begin : p.end] for p in self.media])


def prepare(
    scheduled: Sequence[ScheduledTokens],
    slots: Slots,
    block_size: int,
    num_axes: int,
    device: torch.device,
    *,
    spans_of: SpansOf | None = None,
    frame_for: Callable[[StepArrays], DecodeFrame | None] | None = None,
    ahead: int = 0,
) -> StepBatch:
    """Builds the inputs of a pass and copies them to the device. The block tables in `slots` hold
    the new blocks of the step already. spans_of: gives BatchLayout.spans. frame_for: returns the
    frame of a recorded decode step that fits, or None. ahead: how many places after its own each
    row's token, or media embedding, is."""
    indices = np.array([slots[item.request_id].index for item in scheduled], dtype=np.int64)
    starts = np.array([item.start for item in scheduled], dtype=np.int64)
    counts = np.array([item.num_tokens for item in scheduled], dtype=np.int64)
    stops = np.cumsum(counts)
    rows = np.repeat(indices, counts)  # [T] slot of each token
    offsets = np.arange(stops[-1]) + np.repeat(starts - stops + counts, counts)  # [T]
    positions = offsets
    if num_axes:
        generated = np.repeat((offsets + slots.deltas[rows])[None], num_axes, axis=0)
        positions = _mrope_positions(scheduled, slots, generated, stops - counts)
    where = (indices, starts + counts, rows, offsets, block_size)
    arrays = StepArrays(
        token_ids=slots.token_ids[rows, offsets + ahead],
        positions=positions,
        in_prompt=offsets + ahead < slots.prompt_lens[rows],
        query_lens=counts,
        context_lens=starts + counts,
        pagings=tuple(_paging(tables, *where) for tables in slots.tables),
        is_long=None if slots.is_long is None else slots.is_long[rows],
    )
    spans = spans_of(scheduled, slots) if spans_of else ()
    inputs = [replace(item, start=item.start + ahead) for item in scheduled] if ahead else scheduled
    media = _media_pieces(inputs, slots, stops - counts)
    frame = None if frame_for is None or spans or media else frame_for(arrays)
    tensors = _tensors(arrays, spans, device) if frame is None else frame.fill(arrays)
    return StepBatch(
        scheduled=tuple(scheduled),
        tensors=tensors,
        has_prompt=bool(arrays.in_prompt.any()),
        slots=indices,
        last_rows=stops - 1,
        ends=starts + counts,
        media=media,
        frame=frame,
    )


def _paging(
    tables: BlockTables, indices: Ints, ends: Ints, rows: Ints, offsets: Ints, block_size: int
) -> Paging:
    """Returns block tables as wide as the longest, and the cache slot of each token's key and
    value."""
    num_blocks = -(-int(ends.max()) // block_size)
    blocks = tables.ids[rows, offsets // block_size].astype(np.int64)
    return Paging(tables.ids[indices, :num_blocks], blocks * block_size + offsets % block_size)


def _tensors(
    arrays: StepArrays, spans: tuple[tuple[int, int, int], ...], device: torch.device
) -> StepTensors:
    """Copies the arrays to the device; the lengths for a GPU only: CPU kernels read the tuples."""
    counts, ends = arrays.query_lens, arrays.context_lens
    paging = [array for each in arrays.pagings for array in each]
    flags = [] if arrays.is_long is None else [arrays.is_long]
    inputs = [arrays.token_ids, arrays.positions, arrays.in_prompt, *paging, *flags]
    if device.type != "cpu":
        starts = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        inputs += [starts, ends.astype(np.int32)]
    token_ids, positions, in_prompt, *rest = to_device_together(inputs, device)
    is_long = rest.pop(len(paging)) if flags else None
    (tables, slots, *windows), lengths = rest[: len(paging)], rest[len(paging) :]
    is_prefill = counts > 1
    layout = BatchLayout(
        num_decode=int(is_prefill.argmax()) if is_prefill.any() else len(counts),
        query_lens=tuple(counts.tolist()),
        context_lens=tuple(ends.tolist()),
        block_tables=tables,
        slots=slots,
        spans=spans,
        windows=(windows[0], windows[1]) if windows else None,
        lengths=StepLengths(
            query_starts=lengths[0],
            context_lens=lengths[1],
            max_query=int(counts.max()),
            max_context=int(ends.max()),
        )
        if lengths
        else None,
    )
    return StepTensors(token_ids, positions, in_prompt, layout, is_long)


def _mrope_positions(
    scheduled: Sequence[ScheduledTokens], slots: Slots, positions: Ints, first_rows: Ints
) -> Ints:
    """Returns `positions` [axes, T] of generated tokens, with the model's own for those of prompts.
    first_rows: [B] row of each item's first token."""
    for item, row in zip(scheduled, first_rows.tolist(), strict=True):
        own = slots[item.request_id].positions
        if own is not None and item.start < own.shape[1]:
            end = min(item.start + item.num_tokens, own.shape[1])
            positions[:, row : row + end - item.start] = own[:, item.start : end]
    return positions


def _media_pieces(
    scheduled: Sequence[ScheduledTokens], slots: Slots, first_rows: Ints
) -> tuple[MediaPiece, ...]:
    pieces = []
    for item, row in zip(scheduled, first_rows.tolist(), strict=True):
        stop = item.start + item.num_tokens
        for span in slots[item.request_id].media_in(item):
            piece = _media_piece(span, item.start, stop, row)
            if piece is not None:
                pieces.append(piece)
    return tuple(pieces)


def _media_piece(span: MediaSpan, start: int, stop: int, row: int) -> MediaPiece | None:
    """Returns the piece of a span within tokens start..stop; None when it holds no embeddings.
    row: the row of token `start` in the step."""
    if span.rows is None:
        begin, end = max(start - span.offset, 0), min(stop, span.end) - span.offset
        offsets = np.arange(begin, end)
    else:
        begin = bisect_left(span.rows, start - span.offset)
        end = bisect_left(span.rows, stop - span.offset)
        offsets = np.array(span.rows[begin:end], dtype=np.int64)
    if begin == end:
        return None
    rows = offsets + (span.offset - start + row)
    return MediaPiece(item=span.item, begin=begin, end=end, rows=rows)


def spans_of_prompts(scheduled: Sequence[ScheduledTokens], slots: Slots) -> Spans:
    """Returns (sequence, start, end) of every whole prompt with media, for models with
    sees_prompts."""
    return tuple(
        (sequence, 0, slots[item.request_id].request.prompt_len)
        for sequence, item in enumerate(scheduled)
        if slots[item.request_id].media and not item.start
    )


def spans_of_items(scheduled: Sequence[ScheduledTokens], slots: Slots) -> Spans:
    """Returns (sequence, start, end) of every run of media embeddings that this step touches, for
    models with atomic media."""
    return tuple(
        (sequence, start, end)
        for sequence, item in enumerate(scheduled)
        for span in slots[item.request_id].media
        if span.item.kind != "audio"  # in every model that sees ahead, sounds do not
        for start, end in span.runs
        if start < item.start + item.num_tokens and item.start < end
    )
