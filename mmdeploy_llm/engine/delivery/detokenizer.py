"""Detokenizer: turns token ids into text, a few tokens at once.

    window:  [ context, shown already | new ]      text = decode(window)
                                      ^ shown      delta = text[shown:], less what may change

Each push decodes only the last ids, so that the work per token does not grow with the text. Text
that later ids could change is held back: a character whose bytes are incomplete (the last U+FFFD,
if the text ends with one), and a run of byte-fallback tokens, because decoders validate a run as a
whole: one wrong byte at its end turns all of it into U+FFFD. (`DecodeStream` of the tokenizers
library raises an exception in this case.)

Where an answer is cut, a character of which the last bytes are missing is no text: what more tokens
would have made of it nobody knows. Wrong bytes stay U+FFFD, wherever they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any

from mmdeploy_llm.values.text.byte_letters import BYTE_OF

REPLACEMENT = "\ufffd"
AS_WRITTEN = MappingProxyType({"skip_special_tokens": False, "clean_up_tokenization_spaces": False})
# Ids kept when the window is shortened. UTF-8 decoding resynchronises after at most 3 bytes of a
# character whose first byte is missing, and an incomplete character at the end has at most 3 bytes:
# 6 tokens hold both.
CONTEXT_SIZE = 6
WINDOW_SIZE = 24
MOST_BYTES = 3  # of a character whose last bytes are missing


class Vocabulary:
    """The parts of transformers' tokenizer that detokenization reads; shared by all requests.

    The tokenizer's clean-up of spaces is never applied: it rewrites what the model wrote.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        special_ids = {token_id for token_id, token in added.items() if token.special}
        self.special_ids = frozenset(special_ids.union(tokenizer.all_special_ids))
        self.byte_ids = frozenset(self.ids_of(f"<0x{byte:02X}>" for byte in range(256)))
        self._texts: dict[int, str] = {}
        self._known: set[int] = set()

    def ids_of(self, tokens: Iterable[str]) -> list[int]:
        """Returns the ids of those `tokens` that are one token of the vocabulary."""
        texts = tuple(tokens)
        ids = self._tokenizer.convert_tokens_to_ids(list(texts))
        known = [token_id for token_id in ids if token_id is not None]
        found = zip(known, self._tokenizer.convert_ids_to_tokens(known), strict=True)
        return [token_id for token_id, token in found if token in texts]

    def token(self, token_id: int) -> str:
        """Returns the token with an id; "" for none."""
        return str(self._tokenizer.convert_ids_to_tokens(token_id) or "")

    def known(self, token_ids: Sequence[int]) -> list[int]:
        """Returns `token_ids` without ids that have no token; models have such ids as padding."""
        if not self._known.issuperset(token_ids):
            tokens = self._tokenizer.convert_ids_to_tokens(list(token_ids))
            self._known.update(own for own, token in zip(token_ids, tokens, strict=True) if token)
        return [token_id for token_id in token_ids if token_id in self._known]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of a whole sequence, special tokens included."""
        return str(self._tokenizer.decode(token_ids, **AS_WRITTEN))

    def decode_uncut(self, token_ids: Sequence[int]) -> str:
        """Returns the same without a last character of which only the first bytes are there."""
        text = self.decode(token_ids)
        last = list(token_ids[-MOST_BYTES:])
        tokens = self._tokenizer.convert_ids_to_tokens(last)
        has_fallback = last[-1] in self.byte_ids
        bytes_of = _byte_of_fallback if has_fallback else _bytes_of
        num_cut = _num_cut(b"".join(map(bytes_of, tokens)))
        if has_fallback and num_cut:  # a token for each byte; the rest of their run may be right
            return self.decode(token_ids[:-num_cut])
        return text[:-1] if num_cut else text

    def text_of(self, token_id: int) -> str:
        """Returns the text of one token as it appears after another, so with its leading space."""
        text = self._texts.get(token_id)
        if text is None:
            alone = self.decode([token_id])
            text = self._texts[token_id] = self.decode([token_id, token_id])[len(alone) :]
        return text


class Detokenizer:
    """The growing text of one request.

    All deltas and `finish` together equal `tokenizer.decode(ids, skip_special_tokens=...)`, however
    the ids are split, less a character in which they are cut; no delta ends inside a character.
    Tokens whose text is one of `markers` are kept even when special tokens are skipped. Writer: the
    pipeline that owns it.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        skip_special_tokens: bool = True,
        markers: Sequence[str] = (),
    ) -> None:
        self._vocabulary = vocabulary
        skipped = vocabulary.special_ids if skip_special_tokens else frozenset()
        self._skipped = skipped.difference(vocabulary.ids_of(markers)) if skipped else skipped
        self._window: list[int] = []
        self._num_shown = 0  # characters of the window's text that were delivered

    def show(self, tags: Sequence[str]) -> None:
        """Keeps tokens whose text is one of `tags`, like markers."""
        self._skipped = self._skipped.difference(self._vocabulary.ids_of(tags))

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that becomes final with `token_ids`."""
        visible = [token_id for token_id in token_ids if token_id not in self._skipped]
        self._window += self._vocabulary.known(visible)
        if not self._window or self._window[-1] in self._vocabulary.byte_ids:
            return ""
        text = self._vocabulary.decode(self._window)
        num_settled = _num_settled(text)
        begin, self._num_shown = self._num_shown, num_settled
        if len(self._window) > WINDOW_SIZE:
            self._shorten()
        return text[begin:num_settled]

    def finish(self, *, is_cut: bool) -> str:
        """Returns the text that was held back, decoded without anything after it.

        is_cut: the model would have gone on; a character that it has only begun is left out.
        """
        text = self._vocabulary.decode(self._window)
        if is_cut and text.endswith(REPLACEMENT):
            text = self._vocabulary.decode_uncut(self._window)
        delta = text[self._num_shown :]
        self._window = []
        self._num_shown = 0
        return delta

    def _shorten(self) -> None:
        # This may split a character, whose rest then decodes to something else. That does no harm:
        # the character was shown before, and only the length of its text is used.
        self._window = self._window[-CONTEXT_SIZE:]
        self._num_shown = _num_settled(self._vocabulary.decode(self._window))


def _num_settled(text: str) -> int:
    """Returns the length of `text` without a last character that may be incomplete."""
    return len(text) - text.endswith(REPLACEMENT)


def _num_cut(data: bytes) -> int:
    """Returns how many bytes at the end begin a character of UTF-8 and are not all of it."""
    for number in range(1, min(MOST_BYTES, len(data)) + 1):
        try:
            data[-number:].decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return number
    return 0


def _bytes_of(token: str | bytes) -> bytes:
    """Returns the bytes of a token, as decoders of byte-level BPE do: a token with a character that
    is none of their alphabet is text."""
    if isinstance(token, bytes):
        return token
    if all(char in BYTE_OF for char in token):
        return bytes(BYTE_OF[char] for char in token)
    return token.encode("utf-8", "surrogatepass")


def _byte_of_fallback(token: str) -> bytes:
    """Returns the byte that a token such as <0xE4> stands for, and a whole character for others."""
    is_byte = token.startswith("<0x") and len(token) == len("<0xE4>")
    return bytes.fromhex(token[3:5]) if is_byte else b"-"
