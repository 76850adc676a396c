"""ForwardInputs: what a model's forward receives. Shapes: T tokens of the step, H heads, K
key/value heads, D head size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


class AttentionContext(Protocol):
    """Causal attention of this step's tokens over everything their sequences hold so far.

    Tokens of one media item of a model with atomic media see each other in both directions.
    """

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Stores `k`, `v` [T, K, D] in the cache of `layer` and returns attention of `q`
        [T, H, D] as [T, H, D], in the same dtype.

        scale: factor of the scores, D ** -0.5 when None. window: a token sees the last `window`
        tokens, itself included; all when None. softcap: a score s becomes
        softcap * tanh(s / softcap).
        """
        ...


@runtime_checkable
class FixedAttention(AttentionContext, Protocol):
    """Attention whose own tensors lie where they lay in every step of the same `frame`, so that
    recorded kernel calls find them; None when they do not."""

    frame: object | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTurn:
    """What becomes of the heads of q and k before attention. cosines, sines: [T, R] float32, by
    which the first 2 R channels of every head turn, see layers.rotary. q_weight, k_weight, eps: of
    RMS norms [D] before that; None: no norms."""

    cosines: Tensor
    sines: Tensor
    is_interleaved: bool
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 0.0


@runtime_checkable
class TurningAttention(AttentionContext, Protocol):
    """Attention that turns heads while it stores keys, where `can_turn`."""

    can_turn: bool

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        turn: HeadTurn | None = None,
    ) -> Tensor:
        """As AttentionContext of the turned `q` and `k`, which may be written into."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardInputs:
    """All tokens of one step, of all sequences, one behind the other.

    token_ids: [T] int64. positions: [T] int64, or [3, T] (time, height, width) for M-RoPE models.
    in_prompt: [T] bool, False for tokens that the model generated. has_prompt: whether any may be
    True, which the host knows without asking the device. media_rows: [T] places in
    `token_ids` that take a media embedding instead of the token's own, int64 [M], ascending;
    media_embeds: [M, media_size], of which the first `hidden` are the embedding itself; both None
    when the step has no media.
    """

    token_ids: Tensor
    positions: Tensor
    in_prompt: Tensor
    attn: AttentionContext
    media_rows: Tensor | None = None
    media_embeds: Tensor | None = None
    has_prompt: bool = True

    def merge_media(self, hidden: Tensor) -> Tensor:
        """`hidden` [T, hidden] with the media embeddings at their places (written into
        `hidden`)."""
        if self.media_rows is None or self.media_embeds is None:
            return hidden
        embeds = self.media_embeds[:, : hidden.shape[1]]
        return hidden.index_copy_(0, self.media_rows, embeds.to(hidden.dtype))
