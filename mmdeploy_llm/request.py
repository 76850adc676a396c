"""Request: the only mutable record of a prompt on its way through the engine.

    intake          schedule                                  delivery
    -----------> WAITING --admit--> RUNNING --last token--> FINISHED
                    ^                  |
                    +----- preempt ----+      (blocks freed, tokens kept, recomputed later)

The scheduler is the only writer of a Request after intake has built it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from .values.adapter_ref import AdapterRef
from .values.deadline import Deadline
from .values.outputs.request_output import FinishReason
from .values.pooling_request import PoolingRequest

if TYPE_CHECKING:
    from torch import Tensor

    from .values.params import (
        SamplingParams,  # pydantic's classes take longer to load than all the rest
    )


class RequestStatus(enum.Enum):
    """State of a request in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


ENDLESS = 2**62  # after every token of a sequence
TEXT = "text"  # the kind of what an encoder reads that is no media
ITEM_NUMBER = "\ue000"  # a character for private use, so no text that is meant holds it


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaInput:
    """One processed media item, ready for the model's encoder.

    kind: the kind of its processor.
    tensors: inputs of the model's `encode_media` (grid models: `pixels` [num_patches, patch_dim]).
    embeds: [num_tokens, media_size] in the model's dtype, where the caller has computed what
        `encode_media` would return, which is then not called. None for all others.
    grid_thw: patches in time, height and width before merging, for families with such a grid.
    num_tokens: embeddings that the encoder returns, equal to the number of placeholder tokens.
    num_text_tokens: how many of them an encoder makes of the prompt's text, read with the item.
    key: identity of the content and of the options that shaped it.
    adapter: key of the adapter that encodes the item with the model, and is then part of `key`; "":
        none.
    prompt_text: text that replaces the item's placeholder in the prompt where that is more than
        placeholder tokens, such as separators between the rows of an image; it contains num_tokens
        placeholder tokens. None: placeholder tokens alone. Each ITEM_NUMBER in it becomes the
        item's number among those of its kind in the prompt, from 0.
    other_tokens: (token, rows) for media of which some embeddings stand, in the final prompt, at
        another token than the placeholder, such as those of the sound of a video: rows ascend.
    size, shown: (width, height) of a picture, upright, and as the model sees it, where the
        processor says so; of an item that was counted, not of one that was processed.
    num_frames, seconds: frames used of a video, and the time from the first to the end of the last.
    notes: what of the item the model does not get as it is, or what is a guess, in sentences.
    """

    kind: str
    tensors: Mapping[str, Tensor]
    num_tokens: int
    key: str
    grid_thw: tuple[int, int, int] | None = None
    prompt_text: str | None = None
    embeds: Tensor | None = None
    other_tokens: tuple[tuple[str, tuple[int, ...]], ...] = ()
    num_frames: int = 0
    seconds: float = 0.0
    size: tuple[int, int] | None = None
    adapter: str = ""
    shown: tuple[int, int] | None = None
    num_text_tokens: int = 0
    notes: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """Its tokens by kind; those of text that is read with it are of the kind "text"."""
        own = {self.kind: self.num_tokens - self.num_text_tokens}
        return {**own, TEXT: self.num_text_tokens} if self.num_text_tokens else own


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaView:
    """Which tokens of a sequence an item outside of it is meant for: first .. end, None: to the
    end of the answer; and how many of the item's tokens they see."""

    first: int
    end: int | None
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSpan:
    """A media item at its position in the prompt: it covers tokens `offset` .. `end`.

    rows: indices, relative to `offset`, of the tokens that take the item's embeddings: ascending,
        the first is 0, num_tokens in all. None when all of them do. Tokens of prompt_text before
        the first and after the last placeholder are not part of the span. (): the item stands
        outside of the prompt, and all tokens of the sequence attend to it, see caches.CrossKV.
    view: of an item outside, if it is not meant for all tokens; see `forward.CrossContext`.
    """

    offset: int
    item: MediaInput
    rows: tuple[int, ...] | None = None
    view: MediaView | None = None

    @property
    def end(self) -> int:
        """First token position after the span."""
        if self.rows == ():
            return ENDLESS
        return self.offset + (self.item.num_tokens if self.rows is None else self.rows[-1] + 1)

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(first, last + 1) token positions of each contiguous run of embeddings."""
        if not self.rows:
            return () if self.rows == () else ((self.offset, self.end),)
        cuts = [at for at, (a, b) in enumerate(pairwise(self.rows), 1) if b != a + 1]
        bounds = [0, *cuts, len(self.rows)]
        return tuple(
            (self.offset + self.rows[a], self.offset + self.rows[b - 1] + 1)
            for a, b in pairwise(bounds)
            if a < b
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One sequence to generate.

    The first group of fields is set by intake and never changes. The second belongs to the
    scheduler. Every field of `params` is resolved, `params.max_tokens` included; None no longer
    means "the model's default".
    """

    request_id: str
    prompt: str | None  # the text of the prompt, rendered if it is a chat; None if given as ids
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    media: tuple[MediaSpan, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas, as the chat template got them
    item: Any = None  # the object that the caller passed in
    prompt_text: str = ""  # `prompt`, or decoded ids: the reasoning parser starts from it
    reasoning_end_ids: tuple[int, ...] = ()  # forced at params.reasoning_max_tokens; (): no cap
    # Sequences that are never generated, those of bad_words included.
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    index: int = 0  # among the n samples of one prompt
    wanted: PoolingRequest | None = None  # vectors or a score; None: text
    token_types: tuple[int, ...] | None = None  # of prompt_token_ids; see ForwardInputs
    # Layer and head of each cross attention whose weights the answer has.
    heads: tuple[tuple[int, int], ...] = ()
    priority: int = 0  # smaller is served first
    deadline: Deadline | None = None
    adapter: AdapterRef | None = None  # that computes it, with the model
    is_shared: bool = False  # others begin like it: their prefix is computed once, see admission.py
    stream: bool = False  # True: every new token is delivered; False: only the complete output
    arrival_time: float = 0.0  # epoch seconds
    preprocess_end_time: float = 0.0  # epoch seconds

    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0  # tokens whose keys and values are in the cache
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    block_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    inference_start_time: float | None = None  # epoch seconds
    first_token_time: float | None = None  # epoch seconds
    last_token_time: float | None = None  # epoch seconds
    num_preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of prompt and generated tokens."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def has_media_outside(self) -> bool:
        """Whether its media stand outside of the prompt, all of them: it needs all at once, from
        its first token to its last."""
        return bool(self.media) and all(span.rows == () for span in self.media)

    def num_media_tokens(self, kind: str) -> int:
        """Returns the placeholder tokens of all media of one kind, without markers around them."""
        return sum(span.item.counts.get(kind, 0) for span in self.media)
