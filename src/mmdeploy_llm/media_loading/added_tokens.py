"""Gives a tokenizer the placeholders of processors whose items are whole prompts."""

from __future__ import annotations

from typing import Any, TypeVar

from .kinds import ModelMedia

Tokenizer = TypeVar("Tokenizer", bound=Any)


def with_placeholders(
    tokenizer: Tokenizer, media: ModelMedia, vocab_size: int
) -> tuple[Tokenizer, int]:
    """Returns a tokenizer with the placeholders that it lacks, after its vocabulary, and the number
    of ids that prompts may have. vocab_size: this number without them."""
    alone = [one.token for one in media.processors.values() if one.is_whole_prompt]
    new = [token for token in alone if tokenizer.token_id(token) is None]
    if not new:
        return tokenizer, vocab_size
    tokenizer.raw.add_tokens(new, special_tokens=True)
    tokenizer.close()
    return type(tokenizer)(tokenizer.raw), max(vocab_size, len(tokenizer.raw))
