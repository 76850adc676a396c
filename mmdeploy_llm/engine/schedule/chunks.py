"""The chunk of a request that a step computes, limited by tokens, media borders and encoder
cache."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from mmdeploy_llm.request import MediaInput, MediaSpan, Request

from .encoder_budget import EncoderBudget
from .limits import SchedulerConfig
from .state import RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens `start` .. `end` of a request, and the media that overlap them.

    waits_for_encoder: the chunk would be longer if the encoder had capacity. An empty chunk that
        does not wait for the encoder waits for the token budget.
    """

    start: int
    end: int
    media: tuple[MediaInput, ...] = ()
    waits_for_encoder: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens to compute; 0 when the request has to wait."""
        return self.end - self.start


def next_chunk(
    request: Request, start: int, num_tokens: int, config: SchedulerConfig, encoder: EncoderBudget
) -> Chunk:
    """Returns the longest chunk from `start` on within a budget of `num_tokens`. Changes nothing.

    prompt      t t t [ image A . . . ] t t [ image B . . . ] t t
    budget      |---------------------------------|           split in B: allowed,
    atomic      |---------------------------|                 split before B when media are atomic,
    full cache  |---------------------------|                 or when B cannot be encoded now
    """
    end = min(start + num_tokens, request.num_tokens)
    if config.atomic_media:
        end = whole_runs_end(request, start, end)
    spans = spans_between(request, start, end)
    media = tuple(span.item for span in spans)
    num_holdable = _num_holdable(request, media, encoder) if media else 0
    waits = num_holdable < len(spans)
    if waits:
        end = max(start, spans[num_holdable].offset)
    if end < request.num_tokens and not config.enable_chunked_prefill:
        end, num_holdable = start, 0
    return Chunk(start=start, end=end, media=media[:num_holdable], waits_for_encoder=waits)


def _num_holdable(request: Request, media: tuple[MediaInput, ...], encoder: EncoderBudget) -> int:
    whole = request.has_media_outside
    return encoder.num_holdable(request.request_id, media, is_whole=whole)


def spans_between(request: Request, start: int, end: int) -> list[MediaSpan]:
    """Returns the media spans that overlap tokens `start` .. `end`, in order."""
    found: list[MediaSpan] = []
    if start >= end or not request.media:
        return found
    first = bisect_right(request.media, start, key=attrgetter("end"))
    for span in request.media[first:]:
        if span.offset >= end:
            break
        found.append(span)
    return found


def are_apart(request: Request) -> bool:
    """Whether the spans follow one another, or all stand outside of the prompt."""
    pairs = pairwise(request.media)
    return request.has_media_outside or all(one.end <= two.offset for one, two in pairs)


def split_spans(request: Request) -> list[MediaSpan]:
    """Returns the spans of which only the first part is computed: at most one that is inside of
    the prompt."""
    end = request.num_computed_tokens
    return [span for span in spans_between(request, end, end + 1) if span.offset < end]


def whole_runs_end(request: Request, start: int, end: int) -> int:
    """Returns `end`, or the first token (not before `start`) of the run of embeddings that `end`
    would split. A span may be split in the text between its runs."""
    for span in reversed(spans_between(request, start, end)):
        if span.offset < end < span.end:
            cut = (max(start, first) for first, last in span.runs if first < end < last)
            return next(cut, end)
    return end


MIN_TOKENS = 256  # between two media borders: each costs a step


def tokens_to_border(
    state: RequestState, start: int, num_tokens: int, config: SchedulerConfig
) -> int:
    """Returns how many tokens from `start` on to compute in a step, at most num_tokens: up to the
    next border, else to the last end of a block, if the prompt goes on after it."""
    request, size = state.request, config.block_size
    if not config.enable_prefix_caching or not config.enable_chunked_prefill:
        return num_tokens
    last = (len(request.prompt_token_ids) - 1) // size * size
    borders = [state.shared_end, last]
    for span in request.media:
        border = span.offset // size * size
        if border > start and (start == 0 or border - start >= MIN_TOKENS):
            borders.append(border)
            break
    following = min((border for border in borders if border > start), default=None)
    end = min(start + num_tokens, request.num_tokens)
    if following is not None and following <= end:
        end = following
    elif end < request.num_tokens and end // size * size > start:
        end = end // size * size
    else:
        return num_tokens
    if config.atomic_media:
        end = whole_runs_end(request, start, end)
    return end - start if end > start else num_tokens
