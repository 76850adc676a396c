"""The base of backends that call libraries for attention over ragged batches. A step is at most
three calls.

    rows of the step   [ decode: one token each | prefill: whole prompts or chunks of them ]
    calls                first                    second
    spans                a third call for the tokens of atomic media, which attend to all of their
                         item: a sequence that ends where the span ends, without a causal mask

Shapes: T tokens of the step, B sequences, H query heads, K key/value heads, D head size, N blocks,
P tokens in a block, M blocks in the longest block table.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.forward import Alibi, AttentionContext, QKRotary
from mmdeploy_llm.hooks.objects.attention import (
    AttentionBackend,
    BatchLayout,
    KVCache,
    without_spans,
)
from mmdeploy_llm.layers.transfer import to_device

from .layouts import lengths_of
from .writing import CacheWriter, write_by_kernel, write_plain


@dataclass(frozen=True, kw_only=True)
class Call:
    """The sequences of one library call.

    starts: [B + 1] int32, the first row of each sequence.
    context_lens: [B] int32, keys of each sequence; its query rows are the last of them.
    tables: [B, M] int32.
    is_decode: every sequence has one row.
    is_causal: False for spans, whose rows all attend to the whole context.
    """

    starts: Tensor
    context_lens: Tensor
    tables: Tensor
    max_query: int
    max_context: int
    is_decode: bool = False
    is_causal: bool = True

    @cached_property
    def key_starts(self) -> Tensor:
        """Cumulative context lengths, [B + 1] int32, which some libraries require."""
        ends = self.context_lens.cumsum(0, dtype=torch.int32)
        return torch.nn.functional.pad(ends, (1, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of one layer; see forward.AttentionContext. left: number of keys before its own that
    a row attends to; None: all."""

    scale: float
    left: int | None
    softcap: float | None
    sinks: Tensor | None = None
    alibi: Alibi | None = None

    def window(self, call: Call, unbounded: int | None) -> tuple[int | None, int | None]:
        """Returns the numbers of keys to the left and to the right of its own that a row attends
        to; `unbounded` is the library's value for all keys."""
        left = unbounded if self.left is None else self.left
        return left, 0 if call.is_causal else unbounded


class VarlenBackend(AttentionBackend):
    """Calls a library in one method, `compute`. Reads host lists only for spans, so that decode
    steps can be captured."""

    can_capture = True
    has_sinks = False  # whether `compute` takes them

    def __init__(self, write: CacheWriter = write_plain) -> None:
        self.write = write

    def begin(self, layout: BatchLayout, cache: KVCache) -> AttentionContext:
        """Prepares the step's calls, which all layers share."""
        return VarlenContext(self, layout, cache)

    @abstractmethod
    def compute(
        self, call: Call, q: Tensor, keys: Tensor, values: Tensor, options: Options
    ) -> Tensor:
        """Returns attention of `q` [rows of the call, H, D] over `keys`, `values` [N, P, K, D]."""

    def check(self, layer: int, options: Options) -> None:
        """Raises ModelNotSupportedError for options that the library cannot compute."""
        if options.sinks is not None and not self.has_sinks:
            raise ModelNotSupportedError(
                f"layer {layer} has attention sinks, which {self.name} cannot compute; use "
                "attention_backend='triton' or 'reference'"
            )
        refuse_alibi(layer, options.alibi, self.name)


class VarlenContext:
    """Computes the attention of one step."""

    def __init__(self, backend: VarlenBackend, layout: BatchLayout, cache: KVCache) -> None:
        self._backend = backend
        self._layout = layout
        self._cache = cache
        self.can_rotate = backend.write is write_by_kernel
        self._num_decode = layout.num_decode
        self._decode, self._prefill = calls_of(layout)
        self._spans = span_call(layout) if layout.spans else None
        self._longest_span = max((end - start for _, start, end in layout.spans), default=0)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        alibi: Alibi | None = None,
        rotary: QKRotary | None = None,
    ) -> Tensor:
        """Stores `k`, `v` [T, K, D] and returns attention of `q` [T, H, D] as [T, H, D]; see
        forward.RotaryAttention.

        Raises ModelNotSupportedError for what the library cannot compute: an atomic media item
        longer than the window, and what `check` of the backend rejects.
        """
        options = Options(
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            left=None if window is None else window - 1,
            softcap=softcap,
            sinks=sinks,
            alibi=alibi,
        )
        self._check(layer, window, options)
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        if k is None or v is None:
            assert rotary is None, "a layer without keys rotates its queries itself"
        elif rotary is None:
            self._backend.write(k, v, keys, values, self._layout)
        else:
            write_by_kernel(k, v, keys, values, self._layout, q=q, rotary=rotary)
        out = self._causal(q, keys, values, options)
        if self._spans is not None:
            call, rows = self._spans
            out[rows] = self._backend.compute(call, q[rows], keys, values, options)
        return out

    def causal(self) -> AttentionContext:
        """See forward.AttentionContext."""
        return without_spans(self, self._backend, self._layout, self._cache)

    def _causal(self, q: Tensor, keys: Tensor, values: Tensor, options: Options) -> Tensor:
        compute, count = self._backend.compute, self._num_decode
        if self._prefill is None:
            assert self._decode is not None, "a step has tokens"
            return compute(self._decode, q, keys, values, options)
        if self._decode is None:
            return compute(self._prefill, q, keys, values, options)
        out = torch.empty_like(q)
        out[:count] = compute(self._decode, q[:count], keys, values, options)
        out[count:] = compute(self._prefill, q[count:], keys, values, options)
        return out

    def _check(self, layer: int, window: int | None, options: Options) -> None:
        if window is not None and self._longest_span > window:
            raise ModelNotSupportedError(
                f"a media item of {self._longest_span} tokens is longer than the attention window "
                f"of layer {layer}, {window} tokens, which {self._backend.name} cannot compute; "
                "use attention_backend='triton' or 'reference'"
            )
        self._backend.check(layer, options)


def refuse_alibi(layer: int, alibi: Alibi | None, name: str) -> None:
    """Raises ModelNotSupportedError for biases, which no backend on CUDA computes but plain
    torch."""
    if alibi is not None:
        raise ModelNotSupportedError(
            f"layer {layer} has linear biases of positions (ALiBi), which {name} cannot compute; "
            "use attention_backend='reference'"
        )


def calls_of(layout: BatchLayout) -> tuple[Call | None, Call | None]:
    """Splits the step into a decode and a prefill call; None in place of a call without
    sequences."""
    lengths, count = lengths_of(layout), layout.num_decode
    num_seqs = lengths.context_lens.shape[0]
    decode = prefill = None
    if count:
        decode = Call(
            starts=lengths.query_starts[: count + 1],
            context_lens=lengths.context_lens[:count],
            tables=layout.block_tables[:count],
            max_query=1,
            max_context=lengths.max_context,
            is_decode=True,
        )
    if count < num_seqs:
        starts = lengths.query_starts
        prefill = Call(
            starts=starts[count:] - count if count else starts,
            context_lens=lengths.context_lens[count:],
            tables=layout.block_tables[count:],
            max_query=lengths.max_query,
            max_context=lengths.max_context,
        )
    return decode, prefill


def span_call(layout: BatchLayout) -> tuple[Call, Tensor]:
    """Returns a call without a causal mask for the tokens in spans, and their rows of the step, [R]
    int64. A span becomes a sequence that ends where the span ends, since its tokens attend to all
    keys up to there."""
    query_lens, context_lens, rows, sequences = [], [], [], []
    first_rows = torch.tensor((0, *layout.query_lens)).cumsum(0).tolist()
    for sequence, start, end in layout.spans:
        first = layout.context_lens[sequence] - layout.query_lens[sequence]
        begin = max(start, first)
        row = first_rows[sequence] + begin - first
        rows.append(torch.arange(row, row + end - begin))
        query_lens.append(end - begin)
        context_lens.append(end)
        sequences.append(sequence)
    device = layout.slots.device
    own = BatchLayout(
        num_decode=0,
        query_lens=tuple(query_lens),
        context_lens=tuple(context_lens),
        block_tables=layout.block_tables[to_device(torch.tensor(sequences), device)],
        slots=layout.slots,
    )
    lengths = lengths_of(own)
    call = Call(
        starts=lengths.query_starts,
        context_lens=lengths.context_lens,
        tables=own.block_tables,
        max_query=lengths.max_query,
        max_context=lengths.max_context,
        is_causal=False,
    )
    return call, to_device(torch.cat(rows), device)
