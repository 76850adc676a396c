"""Divides prompts between an encoder and a decoder, by the rule of the model's family: media then
have no placeholders, and stand outside of the tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from mmdeploy_llm.errors import PluginContractError, RequestError
from mmdeploy_llm.hooks import (
    Checkpoint,
    EncoderPrompt,
    EncoderPrompts,
    MediaInput,
    MediaSpan,
    ModelSpec,
)
from mmdeploy_llm.hooks.factories import imported_for
from mmdeploy_llm.values.params import SamplingParams

# Values of params with which they change no answer.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "min_tokens": (0, 1),  # 1 is the default, and becomes 0
    "bad_words": ((), []),
    "bad_words_token_ids": ((), []),
    "logit_bias": ({},),
    "logits_processors": ((), []),
    "no_repeat_ngram_size": (0,),
    "no_repeat_ngram": (None, False),
    "ignore_eos": (False,),
}
MARKS = range(0xE000, 0xF900)  # private-use characters, of which no prompt has all


@dataclass(frozen=True, slots=True, kw_only=True)
class Expanded:
    """A prompt's final token ids and the spans of its media, in order.

    params: adds to a request's params what its answer needs, see EncoderPrompt.processors.
    heads: see EncoderPrompt.
    """

    ids: list[int]
    spans: tuple[MediaSpan, ...]
    params: Callable[[SamplingParams], SamplingParams] = lambda own: own
    heads: tuple[tuple[int, int], ...] = ()


class Written(Protocol):
    """A prompt as text and ids. pieces: of the text; () for a prompt given as ids."""

    @property
    def text(self) -> str: ...
    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def pieces(self) -> Sequence[str]: ...


def encoder_rule(spec: ModelSpec, checkpoint: Checkpoint, owner: str) -> EncoderPrompts | None:
    """Returns how a model's prompts are divided; None for a model without an encoder. owner: the
    plugin of the spec. Raises PluginError for a rule that cannot be imported."""
    if spec.encoder is None:
        return None
    about = f"{spec.encoder}, the encoder's rule of model {spec.name!r} of plugin {owner!r},"
    rule: EncoderPrompts = imported_for(spec.encoder, about)(checkpoint)
    return rule


def divided(
    rule: EncoderPrompts,
    written: Written,
    media: Sequence[MediaInput],
    encode: Callable[[str], list[int]],
) -> Expanded:
    """Returns the decoder's tokens, and what the encoder reads as spans outside of them.

    Raises RequestError for a prompt that the rule refuses, PluginContractError for a rule that
    gives nothing to continue.
    """
    text = written.text if written.pieces else None
    if len(written.pieces) > 1:
        text, encode = _marked(written, encode)
    found = rule.divide(text, written.ids, media, encode)
    if not isinstance(found, EncoderPrompt) or not found.ids:
        raise PluginContractError(
            f"divide of {type(rule).__name__} must return an EncoderPrompt with at least one id"
        )
    views = found.views or (None,) * len(found.items)
    places = found.places or ((),) * len(found.items)
    spans = tuple(
        MediaSpan(offset=min(own, default=0), item=item, rows=_rows(own), view=view)
        for item, view, own in zip(found.items, views, places, strict=True)
    )
    params = partial(_with_needs, found)
    return Expanded(ids=list(found.ids), spans=spans, params=params, heads=found.heads)


def _marked(
    written: Written, encode: Callable[[str], list[int]]
) -> tuple[str, Callable[[str], list[int]]]:
    """Returns the text of a prompt with a mark inside each marker that a user has typed, so that a
    rule takes it for no marker, and what encodes such texts as they were typed."""
    mark = next(chr(code) for code in MARKS if chr(code) not in written.text)

    def encode_typed(text: str) -> list[int]:
        return [token for piece in text.split(mark) for token in encode(piece)]

    return mark.join(written.pieces), encode_typed


def _rows(places: Sequence[int]) -> tuple[int, ...] | None:
    """Returns MediaSpan.rows of an item with these places; (): it stands outside of the tokens."""
    if not places:
        return ()
    start = min(places)
    is_run = max(places) - start + 1 == len(places)
    return None if is_run else tuple(place - start for place in places)


def _with_needs(prompt: EncoderPrompt, params: SamplingParams) -> SamplingParams:
    """Returns params with what the answer needs. A caller who ignores ends ignores these too.
    Raises RequestError for params that the answer cannot keep."""
    if prompt.unguided and params.guided_decoding is not None:
        raise RequestError(f"guided_decoding.{params.guided_decoding.name}: {prompt.unguided}")
    if prompt.greedy and (others := [*_not_greedy(params)]):
        raise RequestError(f"{', '.join(others)}: {prompt.greedy}")
    if prompt.greedy:
        params = params.model_copy(update={"min_tokens": 0})
    found = with_processors(prompt.processors, params)
    if not prompt.end_ids or found.ignore_eos:
        return found
    ends = dict.fromkeys((*found.stop_token_ids, *prompt.end_ids))
    return found.model_copy(update={"stop_token_ids": tuple(ends)})


def _not_greedy(params: SamplingParams) -> Iterator[str]:
    """Yields the names of filled params by which an answer may be another than its likeliest
    tokens, up to the first that ends it."""
    if not params.is_greedy:
        yield "temperature"
    yield from (name for name, own in NEUTRAL.items() if getattr(params, name) not in own)


def with_processors(
    processors: Mapping[str, Mapping[str, Any]], params: SamplingParams
) -> SamplingParams:
    """Returns params with these logits processors, before those of the caller."""
    if not processors:
        return params
    own = [name for name in params.logits_processors if name not in processors]
    arguments = dict(params.logits_processors_args)
    for given in processors.values():
        arguments |= given
    changes = {"logits_processors": (*processors, *own), "logits_processors_args": arguments}
    return params.model_copy(update=changes)
