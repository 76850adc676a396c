"""Divides prompts between an encoder and a decoder, by the rule of the model's family: media then
have no placeholders, and stand outside of the tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mmdeploy_llm.errors import PluginContractError
from mmdeploy_llm.hooks import EncoderPrompt, EncoderPrompts, MediaInput, MediaSpan


def divided(
    rule: EncoderPrompts,
    text: str | None,
    ids: Sequence[int],
    media: Sequence[MediaInput],
    encode: Callable[[str], list[int]],
) -> tuple[list[int], tuple[MediaSpan, ...]]:
    """Returns the decoder's tokens, and what the encoder reads as spans outside of them. text: None
    for a prompt given as ids.

    Raises RequestError for a prompt that the rule refuses, PluginContractError for a rule that
    gives nothing to continue.
    """
    found = rule.divide(text, ids, media, encode)
    if not isinstance(found, EncoderPrompt) or not found.ids:
        raise PluginContractError(
            f"divide of {type(rule).__name__} must return an EncoderPrompt with at least one id"
        )
    return list(found.ids), tuple(MediaSpan(offset=0, item=item, rows=()) for item in found.items)
