"""TokenTexts: which tokens spell a text, as masks over the vocabulary.

A mask is uint32 words [ceil(V / 32)], one bit for each token. Masks are computed when they are
first needed, by one look at every token, and kept: they are asked for with ends of markers only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
BITS = 32  # tokens in one word
MAX_BLANKS = 4  # white space before a tag


class TokenTexts:
    """The bytes of each token, as the text of an answer shows them.

    hidden: ids that the text leaves out, such as special tokens that no parser looks for.
    """

    def __init__(self, texts: Sequence[bytes], hidden: Collection[int]) -> None:
        self._texts = [b"" if i in hidden else text for i, text in enumerate(texts)]
        self._masks: dict[tuple[object, ...], Words] = {}
        self._by_first: dict[int, list[int]] = {}  # first byte -> ids, to look at few tokens
        for token_id, text in enumerate(self._texts):
            if text:
                self._by_first.setdefault(text[0], []).append(token_id)

    def __getitem__(self, token_id: int) -> bytes:
        """The bytes of a token; none for an id without a token."""
        return self._texts[token_id] if token_id < len(self._texts) else b""

    def completing(self, marker: bytes, num_done: int) -> Words:
        """Returns the tokens that complete a marker of which num_done bytes stand already."""
        rest = marker[num_done:]
        if num_done:
            return self._mask(
                ("completing", rest), lambda text: text.startswith(rest), firsts=rest[:1]
            )
        return self._mask(("containing", rest), lambda text: rest in text)

    def overshooting(self, marker: bytes, num_done: int) -> Words:
        """Returns those of them whose text goes on after the marker."""
        rest = marker[num_done:]
        if num_done:
            goes_on = lambda text: text != rest and text.startswith(rest)  # noqa: E731
            return self._mask(("overshooting", rest), goes_on, firsts=rest[:1])
        return self._mask(
            ("containing more", rest), lambda text: rest in text[:-1] and not text.endswith(rest)
        )

    def spelling(self, tags: Sequence[bytes], blanks: bytes, begun: bytes) -> Words:
        """Returns the tokens that go on spelling one of the tags, which white space may precede,
        after the bytes that were begun."""
        if not begun.strip(blanks):
            begun = blanks[:1] * len(begun)  # which white space it is does not matter
        key = ("spelling", tuple(tags), blanks, begun)
        firsts = bytes({*blanks, *(byte for tag in tags for byte in tag)})
        return self._mask(key, lambda text: is_begun(begun + text, tags, blanks), firsts)

    def _mask(
        self, key: tuple[object, ...], is_in: Callable[[bytes], bool], firsts: bytes = b""
    ) -> Words:
        """firsts: bytes with one of which the tokens begin; b"": with any."""
        found = self._masks.get(key)
        if found is None:
            looked_at: Iterable[int] = range(len(self._texts))
            if firsts:
                looked_at = chain.from_iterable(self._by_first.get(byte, ()) for byte in firsts)
            ids = [token_id for token_id in looked_at if is_in(self._texts[token_id])]
            found = self._masks[key] = words_of(ids, len(self._texts))
        return found


def is_begun(text: bytes, tags: Sequence[bytes], blanks: bytes) -> bool:
    """Whether a text is the beginning of one of the tags, after at most MAX_BLANKS blanks."""
    rest = text.lstrip(blanks) if blanks else text
    return len(text) - len(rest) <= MAX_BLANKS and any(tag.startswith(rest) for tag in tags)


def words_of(ids: Sequence[int], vocab_size: int) -> Words:
    """Returns the mask that has these ids."""
    bits = np.zeros(-(-vocab_size // BITS) * BITS, dtype=np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def ban_ids(words: Words, ids: Sequence[int]) -> None:
    """Removes a few ids from a mask."""
    for token_id in ids:
        words[token_id // BITS] &= ~np.uint32(1 << token_id % BITS)


def num_begun(tail: bytes, marker: bytes) -> list[int]:
    """Returns how many bytes of a marker may stand at the end of a text: 0 and all others."""
    return [0, *(n for n in range(1, len(marker)) if tail.endswith(marker[:n]))]
