"""PoolingRequest: asks for something made of the last hidden states instead of text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

What = Literal["vector", "token_vectors", "score", "likelihood"]
Pooling = Literal["last", "cls", "mean"]
TooLong = Literal["error", "cut", "chunk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRequest:
    """A request with it has its prompt only: it generates nothing, and ends when its prompt is
    computed.

    what: one vector, a vector for each token, a score, or the likelihood of a label. pooling: which
        token's state becomes the vector, the last or the first ("cls") one, or the mean of all.
        normalize: whether vectors have length 1. In what a caller asks, None means what the model's
        folder says; the intake fills it in.
    dimensions: a vector is cut to its first ones; None: all of it.
    is_cut_last: whether a vector is normalised before it is cut, as sentence-transformers does it,
        and not after. The intake says so where the caller does not ask for normalised vectors.
    too_long: a text of more tokens than the model reads is an error, is cut to them, or is read in
        windows of them, whose mean vector counts. num_windows: how many; the intake counts them.
    notes: what of a text the model does not get as it is, in sentences, as the intake says it.
    num_skipped: tokens at the beginning that are no part of what is wanted: the mean, the vectors
        of tokens and the likelihood leave them out.
    label: the text whose likelihood after the prompt is wanted.
    instruction: for what the vector is, a text or the name of a prompt that the model's folder has;
        None: the model's default. It is in the prompt when the intake is done.
    is_document: whether that default is the one for documents that are searched, where the folder
        has one.
    """

    what: What | None = None
    pooling: Pooling | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    is_cut_last: bool = False
    too_long: TooLong = "error"
    num_windows: int = 1
    notes: tuple[str, ...] = ()
    num_skipped: int = 0
    instruction: str | None = None
    label: str | None = None
    is_document: bool = False

    def first_needed(self, num_tokens: int) -> int:
        """Returns the first token of a prompt of num_tokens whose state is needed, which no prefix
        cache has."""
        if self.what == "likelihood":
            return self.num_skipped - 1  # its state says how likely the next token is
        if self.what == "token_vectors" or self.pooling == "mean":
            return min(self.num_skipped, num_tokens - 1)
        return 0 if self.pooling == "cls" else num_tokens - 1
