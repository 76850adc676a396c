"""Rendered and TokenCount: a prompt as text and ids, and how many tokens it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmdeploy_llm.messages import MediaItem


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCount:
    """Token counts of a prompt. num_prompt_tokens includes the media placeholders.

    num_input_tokens_by_kind: of its media, kind by kind. shown: (width, height) at which the model
    sees the only item, where that is known.
    """

    num_prompt_tokens: int
    num_input_image_tokens: int
    num_input_video_tokens: int
    num_input_tokens_by_kind: Mapping[str, int] = field(default_factory=dict)
    shown: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A prompt as text and ids, with one placeholder for each item, and its unopened media.

    pieces: the pieces of `text`, tokenized separately; () for a prompt given as ids.
    is_template: a chat template rendered the prompt and has added its own special tokens.
    tools: the tools that the template described to the model.
    token_types: of the ids of a pair of texts.
    """

    text: str
    ids: tuple[int, ...]
    items: tuple[MediaItem, ...]
    pieces: tuple[str, ...] = ()
    is_template: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    token_types: tuple[int, ...] | None = None
