"""Gives a tokenizer the placeholders of processors whose items are whole prompts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from mmdeploy_llm.hooks import MediaProcessor

Tokenizer = TypeVar("Tokenizer", bound=Any)


def with_placeholders(
    tokenizer: Tokenizer, processors: Iterable[MediaProcessor], vocab_size: int
) -> tuple[Tokenizer, int]:
    """Returns a tokenizer with the placeholders that it lacks, after its vocabulary, and the number
    of ids that prompts may have. vocab_size: this number without them."""
    alone = [processor.token for processor in processors if processor.is_whole_prompt]
    new = [token for token in alone if tokenizer.token_id(token) is None]
    if not new:
        return tokenizer, vocab_size
    tokenizer.raw.add_tokens(new, special_tokens=True)
    tokenizer.close()
    return type(tokenizer)(tokenizer.raw), max(vocab_size, len(tokenizer.raw))
