"""The vocabulary of a model as llguidance reads it, and the import of llguidance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from mmdeploy_llm.errors import ConfigError

MAX_REASON = 300  # characters
MAX_TOKEN = 64  # bytes of a token that texts are cut into
RUST_PANIC = "PanicException"  # a BaseException that pyo3 raises for a panic in Rust


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A model's vocabulary, in values that another process can be given.

    tokenizer: the JSON of a fast tokenizer. size: number of ids, at least the tokenizer's.
    eos_token_ids: ids that end a text.
    """

    tokenizer: str
    size: int
    eos_token_ids: tuple[int, ...]

    def read(self) -> tuple[Any, Sequence[bytes]]:
        """Returns llguidance's tokenizer, and the bytes of each token. Raises ConfigError when it
        cannot read this one."""
        library, eos = llguidance(), list(self.eos_token_ids)
        try:
            bare = library.LLTokenizer(self.tokenizer, n_vocab=self.size, eos_token=eos, slices=[])
            tokens = _Tokens(self, bare)
            wrapper = library.TokenizerWrapper(tokens)
            return library.LLTokenizer(wrapper, n_vocab=self.size, eos_token=eos), tokens.tokens
        except BaseException as error:
            raise ConfigError(
                "guided decoding cannot read the tokenizer of this model: "
                f"{first_line(rust_error(error))}"
            ) from error


class _Tokens:
    """The tokens of a vocabulary as llguidance's TokenizerWrapper expects them.

    llguidance would take every added token like <think> for a special one, which no text contains.
    Here a token is special only where the tokenizer says so.
    """

    def __init__(self, vocabulary: Vocabulary, bare: Any) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(vocabulary.tokenizer)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True  # reads special tokens in a text as text
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token_id for token_id, token in added.items() if token.special}
        used = {*self._tokenizer.get_vocab(with_added_tokens=True).values()}
        self.tokens = [b""] * min(vocabulary.size, max(*used, *vocabulary.eos_token_ids) + 1)
        for token_id in used.intersection(range(len(self.tokens))):
            token = added.get(token_id)
            self.tokens[token_id] = (
                bare.decode_bytes([token_id]) if token is None else token.content.encode()
            )
        self.special_token_ids = sorted(special.union(vocabulary.eos_token_ids))
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.bos_token_id = None
        self._ids: dict[bytes, int] = {}

    def __call__(self, text: str) -> list[int]:
        """Returns the ids of a text; the longest tokens one after the other where the tokenizer
        changes texts, such as by a space in front."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if b"".join(self.tokens[token_id] for token_id in ids) == text.encode():
            return ids
        return self._greedy(text.encode())

    def _greedy(self, text: bytes) -> list[int]:
        if not self._ids:
            usual = set(range(len(self.tokens))).difference(self.special_token_ids)
            self._ids = {self.tokens[token_id]: token_id for token_id in sorted(usual)}
        ids, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + MAX_TOKEN), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), None)
            if end is None:
                break  # what has no token ends what is fixed
            ids.append(self._ids[text[start:end]])
            start = end
        return ids


def rust_error(error: BaseException) -> str:
    """Returns the message of an error that a library in Rust raised. Raises the error again when it
    is of another kind, such as KeyboardInterrupt."""
    if not isinstance(error, Exception) and type(error).__name__ != RUST_PANIC:
        raise error
    return str(error)


def first_line(text: str) -> str:
    """Returns the message of a Rust error, without the copy of the grammar that follows."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = next((line for line in lines if line.startswith("error:")), lines[0] if lines else "")
    return found.removeprefix("error:").strip()[:MAX_REASON]


def llguidance() -> ModuleType:
    """Imports llguidance, an optional dependency. Raises ConfigError without it."""
    try:
        import llguidance as module
    except ImportError as error:
        raise ConfigError(
            f"guided_decoding needs llguidance, which cannot be imported ({error}); "
            "run: pip install mmdeploy_llm[guided]"
        ) from error
    found: ModuleType = module
    return found
