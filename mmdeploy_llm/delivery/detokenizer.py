"""Token ids to text, a few tokens at a time.

    window:  [ context, shown already | new ]      text = decode(window)
                                      ^ shown      delta = text[shown:], less what may change

The last ids are decoded at every push, so that the work for a token does not grow with the text.
What later ids could change is held back: a character whose bytes are not all there yet (the last
U+FFFD, if the text ends with one), and a run of byte-fallback tokens, because decoders judge a run
as a whole: one wrong byte at its end turns all of it into U+FFFD. (`DecodeStream` of the tokenizers
library raises an exception there.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

REPLACEMENT = "\ufffd"
# Ids kept when the window is cut. UTF-8 finds its step again after at most 3 bytes of a character
# whose first byte was cut off, and an unfinished character has at most 3 bytes: 6 tokens hold both.
CONTEXT_SIZE = 6
WINDOW_SIZE = 24


class Vocabulary:
    """What detokenization reads from one tokenizer of transformers; shared by all requests.

    The tokenizer's clean-up of spaces is never applied: it rewrites what the model wrote.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        special_ids = {token_id for token_id, token in added.items() if token.special}
        self.special_ids = frozenset(special_ids.union(tokenizer.all_special_ids))
        self.byte_ids = frozenset(self.ids_of(f"<0x{byte:02X}>" for byte in range(256)))
        self._texts: dict[int, str] = {}

    def ids_of(self, tokens: Iterable[str]) -> list[int]:
        """The ids of those `tokens` that the vocabulary has as one token."""
        texts = tuple(tokens)
        ids = self._tokenizer.convert_tokens_to_ids(list(texts))
        known = [token_id for token_id in ids if token_id is not None]
        found = zip(known, self._tokenizer.convert_ids_to_tokens(known), strict=True)
        return [token_id for token_id, token in found if token in texts]

    def known(self, token_ids: Sequence[int]) -> list[int]:
        """`token_ids` without those that no token belongs to; models have such ids as padding."""
        tokens = self._tokenizer.convert_ids_to_tokens(list(token_ids))
        return [token_id for token_id, token in zip(token_ids, tokens, strict=True) if token]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole sequence, special tokens included."""
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def text_of(self, token_id: int) -> str:
        """The text of one token as it stands behind another one, so with its leading space."""
        text = self._texts.get(token_id)
        if text is None:
            alone = self.decode([token_id])
            text = self._texts[token_id] = self.decode([token_id, token_id])[len(alone) :]
        return text


class Detokenizer:
    """The text of one request, growing.

    All deltas and `finish` together are `tokenizer.decode(ids, skip_special_tokens=...)`, however
    the ids are cut; no delta ends inside a character. Tokens whose text is one of `markers` are
    kept even when special tokens are skipped. Writer: the pipeline that owns it.
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

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` settle."""
        visible = [token_id for token_id in token_ids if token_id not in self._skipped]
        self._window += self._vocabulary.known(visible)
        if not self._window or self._window[-1] in self._vocabulary.byte_ids:
            return ""
        text = self._vocabulary.decode(self._window)
        num_settled = _num_settled(text)
        delta = text[self._num_shown : num_settled]
        self._num_shown = num_settled
        if len(self._window) > WINDOW_SIZE:
            self._cut()
        return delta

    def finish(self) -> str:
        """The text that was held back, as it is when nothing follows."""
        delta = self._vocabulary.decode(self._window)[self._num_shown :]
        self._window = []
        self._num_shown = 0
        return delta

    def _cut(self) -> None:
        # The cut may go through a character, whose rest then decodes to something else; it was
        # shown before and only its length counts, so nothing comes of it.
        self._window = self._window[-CONTEXT_SIZE:]
        self._num_shown = _num_settled(self._vocabulary.decode(self._window))


def _num_settled(text: str) -> int:
    """Length of `text` without a last character that may be unfinished."""
    return len(text) - text.endswith(REPLACEMENT)
