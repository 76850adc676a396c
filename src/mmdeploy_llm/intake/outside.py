"""Divides prompts between an encoder and a decoder, by the rule of the model's family: media then
have no placeholders, and stand outside of the tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mmdeploy_llm.errors import PluginContractError
from mmdeploy_llm.hooks import EncoderPrompt, EncoderPrompts, MediaInput, MediaSpan
from mmdeploy_llm.media_loading.kinds import ModelMedia

from .placeholders import Expanded
from .rendered import Rendered


def placed(media: ModelMedia, rule: EncoderPrompts | None) -> ModelMedia:
    """Returns the media that have placeholders in prompts: none of a model with a rule."""
    return media if rule is None else replace(media, processors={}, splitters={})


def divided(
    rule: EncoderPrompts,
    rendered: Rendered,
    media: Sequence[MediaInput],
    encode: Callable[[str], list[int]],
) -> Expanded:
    """Returns the decoder's tokens, and what the encoder reads as spans outside of them. Raises
    RequestError for a prompt that the rule refuses, PluginContractError for a rule that gives
    nothing to continue."""
    text = rendered.text if rendered.pieces else None
    found = rule.divide(text, rendered.ids, media, encode)
    if not isinstance(found, EncoderPrompt) or not found.ids:
        raise PluginContractError(
            f"divide of {type(rule).__name__} must return an EncoderPrompt with at least one id"
        )
    spans = tuple(MediaSpan(offset=0, item=item, rows=()) for item in found.items)
    return Expanded(ids=list(found.ids), spans=spans)
