"""Wanted: what a request asks of the last hidden states of its prompt, where that is no text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

What = Literal["vector", "token_vectors", "score"]
Pooling = Literal["last", "cls", "mean"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A request with it has its prompt only: it generates nothing, and ends when its prompt is
    computed.

    what: one vector, a vector for each token, or a score. pooling: which token's state becomes the
        vector, the last or the first ("cls") one, or the mean of all. normalize: whether vectors
        have length 1. In what a caller asks, None means what the model's folder says; the intake
        fills it in.
    dimensions: a vector is cut to its first ones, before it is normalised; None: all of it.
    num_skipped: tokens at the beginning that the mean and the vectors of tokens leave out.
    instruction: for what the vector is, a text or the name of a prompt that the model's folder has;
        None: the model's default. It is in the prompt when the intake is done.
    """

    what: What | None = None
    pooling: Pooling | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    num_skipped: int = 0
    instruction: str | None = None

    @property
    def needs_all(self) -> bool:
        """Whether the states of all tokens are needed, which a prefix cache does not have."""
        return self.what == "token_vectors" or self.pooling in ("cls", "mean")
