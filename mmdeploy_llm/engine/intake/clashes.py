"""Refuses processors of two kinds that one text of a prompt would stand for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

from mmdeploy_llm.errors import PluginConflictError
from mmdeploy_llm.media.loading.kinds import ModelMedia

from .tokenizer import PromptTokenizer


def check_clashes(media: ModelMedia, tokenizer: PromptTokenizer) -> None:
    """Raises PluginConflictError, which names both, where a token or marker of one kind is one of
    another kind, has the same ids, or begins or ends it: the prompts of one would be read as the
    other's.

    A `written_token` may be another kind's token: it is written when the places of all are known.
    """
    texts = {kind: dict.fromkeys(_texts(media, kind)) for kind in media.read}
    for one, other in combinations(texts, 2):
        for mine, yours in product(texts[one], texts[other]):
            what = _clash(mine, yours, tokenizer)
            if what is not None:
                raise PluginConflictError(
                    f"{media.owner(one)} and {media.owner(other)} cannot serve one model: {what}, "
                    f"so prompts with {one} items and {other} items are not told apart; give each "
                    "kind a token and markers of its own, or block one of the plugins with "
                    "blocked_plugins"
                )


def _texts(media: ModelMedia, kind: str) -> Iterator[str]:
    """Yields the texts that represent an item of a kind."""
    processor = media.processors.get(kind)
    if processor is not None:
        yield processor.token
        yield from processor.markers
    else:
        yield from media.splitters[kind].markers


def _clash(mine: str, yours: str, tokenizer: PromptTokenizer) -> str | None:
    told = text_clash(mine, yours)
    if told is not None:
        return told
    ids = tokenizer.token_ids(mine)
    if ids and ids == tokenizer.token_ids(yours):
        return f"{mine!r} and {yours!r} are the same tokens"
    return None


def text_clash(mine: str, yours: str) -> str | None:
    """Returns how one text may be read as the other, or None."""
    if mine == yours:
        return f"both use {mine!r}"
    short, long = sorted((mine, yours), key=len)
    if long.startswith(short) or long.endswith(short):
        return f"{short!r} {'begins' if long.startswith(short) else 'ends'} {long!r}"
    return None
