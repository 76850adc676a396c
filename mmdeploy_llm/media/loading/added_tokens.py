"""Gives a tokenizer the placeholders of processors whose items are whole prompts, and says which
ids prompts may have."""

from __future__ import annotations

from collections.abc import Iterator
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
        return tokenizer, max(vocab_size, *_after_known(tokenizer, media))
    tokenizer.raw.add_tokens(new, special_tokens=True)
    tokenizer.close()
    return type(tokenizer)(tokenizer.raw), max(vocab_size, len(tokenizer.raw))


def _after_known(tokenizer: Tokenizer, media: ModelMedia) -> Iterator[int]:
    """Yields the ends of vocabularies that hold the tokens at which media of an encoder stand, for
    which a decoder may have embeddings beyond what it writes."""
    yield 0
    if media.encoder is not None and media.has_places:
        found = (tokenizer.token_id(one.token) for one in media.processors.values())
        yield from (token_id + 1 for token_id in found if token_id is not None)
