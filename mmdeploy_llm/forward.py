"""ForwardInputs: the arguments of a model's forward. Shapes: T tokens of the step, H heads, K
key/value heads, D head size."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Alibi:
    """Linear biases of attention scores: factor * (slope * i) for the key at index i of a sequence.

    slopes: [H] float32, contiguous, one for each query head, none of them 0.
    dtype: the product slope * i is rounded to it, as models do that were trained so; None: float32.
    """

    slopes: Tensor
    factor: float = 1.0
    dtype: torch.dtype | None = None

    def biases(self, keys: Tensor) -> Tensor:
        """Returns the biases of the keys with these indices [...], [H, ...] float32."""
        found = self.slopes.view(-1, *[1] * keys.dim()) * keys
        return (found if self.dtype is None else found.to(self.dtype)).float() * self.factor


class AttentionContext(Protocol):
    """Causal attention of this step's tokens over all tokens of their sequences so far.

    In a model with atomic media the tokens of one media item attend to each other in both
    directions.
    """

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
    ) -> Tensor:
        """Stores `k`, `v` [T, K, D] in the cache of `layer` and returns attention of `q`
        [T, H, D] as [T, H, D], in the same dtype.

        k, v: None in a layer whose cache is a caches.SharedKV: another one has stored them.

        scale: factor of the scores, D ** -0.5 when None. window: a token attends to the last
        `window` tokens, itself included; to all when None. softcap: a score s becomes
        softcap * tanh(s / softcap).

        sinks: [H] float32, contiguous, a score of each head that takes part in the softmax as that
        of one more visible key would, and whose value is zero; neither `scale` nor `softcap`
        applies to it. None: no sinks. A model that passes them has an attribute `has_sinks` that is
        True, by which a backend is chosen; one that passes a softcap has `has_softcaps`.

        alibi: biases that are added after `scale` and `softcap`. A model that passes them has an
        attribute `has_alibi` that is True.
        """

    def causal(self) -> AttentionContext:
        """Returns the attention of the same step in which tokens of media see earlier tokens only,
        as text does, for those layers of a model with atomic media that need it."""


@runtime_checkable
class FixedAttention(AttentionContext, Protocol):
    """Attention whose tensors keep their addresses in all steps with the same `frame`, so that
    recorded kernel calls can be replayed. frame: None when the addresses may change."""

    frame: object | None


class AdapterRows(Protocol):
    """Says which rows of a pass have which adapter.

    slots: [T] int32, -1 for none; None where all rows have the same. frame: equal in passes that
    recorded calls may compute alike; None where there are none.
    """

    slots: Tensor | None
    frame: object | None

    def using(self, slots: Tensor) -> AbstractContextManager[None]:
        """Reads the slots from this tensor within the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QKRotary:
    """Rotary embedding of q and k, with the norms before it, as data for a kernel.

    cosines, sines: [T, R] float32, for the first 2 R channels of every head; see Rotary.
    q_weight, k_weight, eps: RMS norms [D] of the heads before the rotation; None: no norms.
    """

    cosines: Tensor
    sines: Tensor
    is_interleaved: bool
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 0.0


@runtime_checkable
class RotaryAttention(AttentionContext, Protocol):
    """Attention that rotates q and k while it stores the keys, if `can_rotate`."""

    can_rotate: bool

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
        """Applies `rotary` to `q` and `k`, perhaps in place, then attends as AttentionContext
        does. Without `k` there is no `rotary`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRows:
    """The tokens of one sequence in a step: rows start .. end, after num_cached tokens that the
    cache holds."""

    start: int
    end: int
    num_cached: int


@runtime_checkable
class SequenceAttention(Protocol):
    """The KV cache by sequence, for models that compute attention themselves. The engine passes it
    to models with an attribute `attends_itself` that is True."""

    @property
    def sequences(self) -> Sequence[SequenceRows]:
        """The sequences of the step, in the order of their rows."""

    def extend(
        self, sequence: int, layer: int, k: Tensor, v: Tensor, num_kept: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Stores `k`, `v` [n, K, D] of the step's tokens of a sequence, an index of `sequences`, in
        the cache of `layer`. Returns the keys and values of all its tokens so far [L, K, D]; of the
        cached ones the last `num_kept` only, unless that is None."""


@runtime_checkable
class SideBySideAttention(SequenceAttention, Protocol):
    """The KV cache of several sequences at once, which a context may have besides `extend`."""

    def extend_each(
        self,
        sequences: Sequence[int],
        layer: int,
        k: Tensor,
        v: Tensor,
        num_kept: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Does what `extend` does for sequences that get one token each, `k`, `v` [B, K, D].
        Returns [B, L, K, D]: those of shorter sequences come last, after finite values."""


class StateContext(Protocol):
    """The states of this step's B sequences, for layers whose cache is a caches.State.

    Row 0 of every tensor is zero, and is the state of a sequence that has not begun; it is never
    written. A layer computes the states after the step from the rows `read`, and stores them in the
    rows `write`. A sequence's two rows differ, so that a step that failed can be computed again;
    rows of different sequences differ, but several sequences may read one row.

    A tensor that a layer may change in place, if it can tell a step that is computed again, has the
    rows `source` and `target` instead, which see layers.states.places. A layer uses either these or
    `read` and `write` for a tensor, always.

    read, write, source, target: [B] int64 on the device.
    query_lens: tokens of each sequence in this step, on the host; their rows follow one another.
    starts: [B + 1] int64 on the host, the first row of each sequence, followed by T.
    num_decode: how many sequences, the first ones, have exactly one token.
    """

    read: Tensor
    write: Tensor
    source: Tensor
    target: Tensor
    starts: Tensor
    query_lens: tuple[int, ...]
    num_decode: int

    def tensors(self, layer: int) -> tuple[Tensor, ...]:
        """Returns the tensors of all states of `layer`, each [rows, *shape], one per shape of its
        caches.State."""


class CrossContext(Protocol):
    """The keys and values that this step's tokens have of their requests' encoder items, for models
    with an attribute `cross`, a caches.CrossKV.

    A token attends to the items that are meant for it (request.MediaView, else all of its request),
    and one for which none is meant to all of them, as transformers has it.
    """

    def attend(self, layer: int, q: Tensor, *, scale: float | None = None) -> Tensor:
        """Returns attention of `q` [T, H, D] to the keys of each token's items as [T, H, D]; zeros
        for a token whose request has none. layer: of the CrossKV. scale: D ** -0.5
        when None."""

    def of(self, sequence: int, layer: int) -> tuple[Tensor, Tensor] | None:
        """Returns keys and values [L, K, D] of all items of a sequence of the step, for a layer
        that computes attention itself; None without any."""

    @property
    def has_items(self) -> bool:
        """Whether any token's request has an item."""

    @property
    def blind_rows(self) -> Tensor | None:
        """Returns the indices of the tokens for which no item is meant; None without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardInputs:
    """All tokens of one step: those of the first sequence, then those of the next, and so on.

    token_ids: [T] int64.
    positions: [T] int64, or [axes, T] for M-RoPE models, mostly time, height, width.
    in_prompt: [T] bool, False for tokens that the model generated.
    has_prompt: whether any of in_prompt may be True, known on the host without a synchronisation.
    states: of the layers that keep one; None for a model without such layers.
    media_rows: [M] int64, ascending, the rows whose token takes a media embedding instead of its
        own.
    media_embeds: [M, media_size]; its first `hidden` columns are the embedding. Both are None when
        the step has no media.
    is_long: [T] bool, tokens of sequences that have more than `long_after` tokens, an attribute of
        the model; None for a model without it. A sequence that grows beyond is computed again.
    cross: of a model with cross attention, None for all others.
    token_types: [T] int64, 0 for the first and 1 for the second text of a pair; None where no
        request of the step has them, and all are 0.
    adapters: what says which tokens have an adapter; None where none has.
    """

    token_ids: Tensor
    positions: Tensor
    in_prompt: Tensor
    attn: AttentionContext
    media_rows: Tensor | None = None
    media_embeds: Tensor | None = None
    has_prompt: bool = True
    states: StateContext | None = None
    is_long: Tensor | None = None
    token_types: Tensor | None = None
    cross: CrossContext | None = None
    adapters: AdapterRows | None = None

    def merge_media(self, hidden: Tensor) -> Tensor:
        """Writes the media embeddings into their rows of `hidden` [T, hidden], and returns it."""
        if self.media_rows is None or self.media_embeds is None:
            return hidden
        embeds = self.media_embeds[:, : hidden.shape[1]]
        return hidden.index_copy_(0, self.media_rows, embeds.to(hidden.dtype))

    def media_features(self, size: int) -> Sequence[Tensor]:
        """Splits the columns of the media embeddings after the first `size` into tensors [M, size];
        tensor i is added after layer i."""
        if self.media_embeds is None or self.media_embeds.shape[1] == size:
            return ()
        parts: Sequence[Tensor] = self.media_embeds[:, size:].split(size, 1)  # type: ignore[no-untyped-call]
        return parts
