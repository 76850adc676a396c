"""When each word is spoken: by the frames to which Whisper's decoder attends as it writes a token.

    weights    of the heads that follow the sound, normed and smoothed, their mean: [tokens, frames]
    a path     through them from the first token and frame to the last, along the largest weights
    times      a token begins at the frame at which the path reaches its row

That is the method of Whisper's authors as transformers has it, so that times are the same. A row is
the step that writes a token; the first token, a time, has none. Shapes: n tokens, h heads, L
frames, 20 ms each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.models.whisper.tokenization_whisper import LANGUAGES, _combine_tokens_into_words

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import Checkpoint

Decode = Callable[[Sequence[int]], str]
BESIDE, ABOVE, LEFT = 0, 1, 2  # where a path comes from: both, the token or the frame before


def alignment_heads(checkpoint: Checkpoint) -> tuple[tuple[int, int], ...]:
    """Returns layer and head of each cross attention that follows the sound: those that
    generation_config.json names, else all of the upper half of the decoder, as Whisper's authors
    have it. Raises CheckpointError for heads that the model does not have."""
    config, found = checkpoint.config, checkpoint.generation.get("alignment_heads")
    layers, heads = config.decoder_layers, config.decoder_attention_heads
    if not found:
        upper = range(layers // 2, layers)
        return tuple((layer, head) for layer in upper for head in range(heads))
    try:
        pairs = tuple((int(layer), int(head)) for layer, head in found)
    except (TypeError, ValueError):
        pairs = ((-1, -1),)
    if not all(0 <= layer < layers and 0 <= head < heads for layer, head in pairs):
        raise CheckpointError(
            f"alignment_heads of generation_config.json are {found!r:.60}, must be pairs of a "
            f"layer below {layers} and a head below {heads}; leave them out for the upper half"
        )
    return pairs


def frames_of(weights: NDArray[np.float32], width: int) -> NDArray[np.int64]:
    """Returns the frame at which each of n tokens begins. weights: [n, h, L]. width: of the median
    filter, an odd number."""
    if not weights.size:
        return np.zeros(len(weights), dtype=np.int64)
    found = torch.from_numpy(weights).transpose(0, 1)
    found = (found - found.mean(-2, keepdim=True)) / found.std(-2, keepdim=True, unbiased=False)
    mean = _smoothed(found, width).mean(0)
    return _path(-mean.nan_to_num().double().numpy())


def _smoothed(x: Tensor, width: int) -> Tensor:
    """Returns the medians of `width` values of [h, n, L] around each, mirrored at the edges."""
    side = width // 2
    if x.shape[-1] <= side:
        return x
    x = torch.nn.functional.pad(x, (side, side), mode="reflect")
    length = x.shape[-1] - 2 * side
    shifted = [x[..., at : at + length] for at in range(width)]
    # The largest is moved to the end, then the next one before it, until the median is there.
    for last in range(width - 1, side - 1, -1):
        for at in range(last):
            one, two = shifted[at], shifted[at + 1]
            shifted[at], shifted[at + 1] = torch.minimum(one, two), torch.maximum(one, two)
    return shifted[side]


def _path(cost: NDArray[np.float64]) -> NDArray[np.int64]:
    """Returns the first column of each row on the cheapest path through costs [n, L].

    Sums are float32 and ties go where transformers' do. A diagonal is computed at once, as its
    cells do not need each other: cell i of diagonal d is row i - 1, column d - i - 1.
    """
    n, length = cost.shape
    inf = np.float32(np.inf)
    before, last = (np.full(n + 1, inf, dtype=np.float32) for _ in range(2))
    before[0] = 0  # diagonal 0 is the corner, diagonal 1 has no cell
    came = np.full((n + length + 1, n + 1), LEFT, dtype=np.int8)
    for diagonal in range(2, n + length + 1):
        first, end = max(1, diagonal - length), min(n, diagonal - 1) + 1
        beside, above, left = (
            before[first - 1 : end - 1],
            last[first - 1 : end - 1],
            last[first:end],
        )
        is_beside = (beside < above) & (beside < left)
        is_above = (above < beside) & (above < left)
        rows = np.arange(first - 1, end - 1)
        best = np.where(is_beside, beside, np.where(is_above, above, left))
        before, last = last, np.full(n + 1, inf, dtype=np.float32)
        last[first:end] = cost[rows, diagonal - 2 - rows] + best
        came[diagonal, first:end] = np.where(is_beside, BESIDE, np.where(is_above, ABOVE, LEFT))
    columns = np.zeros(n, dtype=np.int64)
    row, column = n, length
    while row > 0 and column > 0:
        columns[row - 1] = column - 1
        step = came[row + column, row]
        row -= step != LEFT
        column -= step != ABOVE
    return columns


@dataclass(frozen=True, slots=True, kw_only=True)
class WordTokens:
    """A word with its space and marks, and the places of its tokens in a sentence."""

    text: str
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """Has the parts of a tokenizer with which transformers puts words together."""

    own: Decode
    eos_token_id: int

    def decode(self, ids: Sequence[int], **_: bool) -> str:
        return self.own(ids)


def words_of(
    ids: Sequence[int], language: str | None, end: int, decode: Decode
) -> Iterator[WordTokens]:
    """Yields the words of a sentence as transformers puts them together: by spaces, or in some
    languages by characters, with the marks beside them. language: by code or English name. end: the
    token that ends answers. Tokens that are no whole character at the end belong to the last
    word."""
    name = LANGUAGES.get((language or "en").lower(), language or "english").lower()
    reader = _Reader(own=decode, eos_token_id=end)
    texts, _, places = _combine_tokens_into_words(reader, list(ids), name)
    found = [
        WordTokens(text=text, places=tuple(own)) for text, own in zip(texts, places, strict=True)
    ]
    whole = decode(ids)
    rest = whole.removeprefix("".join(texts)) if whole.startswith("".join(texts)) else ""
    if found and rest:
        left = range(found[-1].places[-1] + 1, len(ids))
        found[-1] = WordTokens(text=found[-1].text + rest, places=(*found[-1].places, *left))
    yield from found
