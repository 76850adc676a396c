"""Describes transformers' fast tokenizers, and makes stand-ins of them that work on the library
tokenizers alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mmdeploy_llm.engine.intake.templates.tokenizer_steps import check_steps
from mmdeploy_llm.weights.cache import NotKeptError

from .config import plain, unplain
from .stand_in import Own, Source, StandIn, own_of

# Attributes of a tokenizer that intake, delivery and templates read.
READ = (
    "all_special_ids",
    "all_special_tokens",
    "chat_template",
    "clean_up_tokenization_spaces",
    "is_fast",
    "model_max_length",
    "name_or_path",
    "padding_side",
    "special_tokens_map",
    "truncation_side",
)
TOKENS = ("bos", "cls", "eos", "mask", "pad", "sep", "unk")
# Methods that a stand-in has of its own: a class that changes one of them is not kept.
SAME = (
    "__call__",
    "__len__",
    "_convert_encoding",
    "_convert_id_to_token",
    "_convert_token_to_id_with_added_voc",
    "_decode",
    "_encode_plus",
    "added_tokens_decoder",
    "backend_tokenizer",
    "convert_ids_to_tokens",
    "convert_tokens_to_ids",
    "decode",
    "get_added_vocab",
    "get_vocab",
    "set_truncation_and_padding",
)
OPTIONS = {"add_special_tokens", "verbose"}  # of a call
PROBES = (
    "",
    " ",
    "Hello,  world!\n\n\tIt's 1,234.5 \u00fcber-caf\u00e9 \u4f60\u597d \U0001f600 e\u0301 \u00a0x",
    "def f(x):\r\n    return x ** 2  # <|im_start|>user</s><s>[INST]<image> \u200b\ufeff",
)
MAX_PROBED = 512  # ids that are decoded, spread over the vocabulary


def describe_tokenizer(tokenizer: Any) -> dict[str, Any]:
    """Returns a tokenizer as plain values. Raises NotKeptError for one that is not fast, whose
    class does more than transformers' own, or of which a stand-in would answer otherwise."""
    from transformers import TokenizersBackend

    kind = type(tokenizer)
    changed = [
        name for name in SAME if getattr(kind, name, None) is not getattr(TokenizersBackend, name)
    ]
    if not isinstance(tokenizer, TokenizersBackend) or changed:
        raise NotKeptError(f"{kind.__name__} reads texts in its own way: {', '.join(changed)}")
    if not kind.__module__.startswith("transformers.") or not check_steps(tokenizer):
        raise NotKeptError(f"{kind.__name__} has expressions or code of its own")
    names = (*READ, *(f"{each}_token{end}" for each in TOKENS for end in ("", "_id")))
    described = {
        "backend": tokenizer.backend_tokenizer.to_str(),
        "splits": bool(tokenizer.split_special_tokens),
        "values": {name: plain(getattr(tokenizer, name)) for name in names},
    }
    found = tokenizer_stand_in(described, Source(lambda: tokenizer))
    if _answers(found) != _answers(tokenizer):
        raise NotKeptError(f"{kind.__name__} does not answer as its backend does")
    return described


def _answers(tokenizer: Any) -> list[Any]:
    """Returns what a tokenizer makes of some texts and ids."""
    tokens = tokenizer.convert_ids_to_tokens(
        list(range(0, len(tokenizer), max(1, len(tokenizer) // MAX_PROBED)))
    )
    added = {key: (str(own), own.special) for key, own in tokenizer.added_tokens_decoder.items()}
    texts = (*PROBES, "".join(text for text, _ in added.values()), "".join(map(str, tokens)))
    found: list[Any] = [len(tokenizer), tokens, added, tokenizer.get_added_vocab()]
    found.append(tokenizer.convert_tokens_to_ids([*map(str, tokens), "<0x0A>", "\ue000none"]))
    for text in texts:
        for special in (True, False):
            ids = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
            options = {"skip_special_tokens": special, "clean_up_tokenization_spaces": False}
            found += [list(ids), tokenizer.decode(ids, **options)]
    return found


class TokenizerStandIn(StandIn):
    """Stands in for a fast tokenizer of transformers."""

    __slots__ = ()

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Returns the ids of a text, as transformers' tokenizer does."""
        own = own_of(self)
        is_plain = len(args) == 1 and type(args[0]) is str and options.keys() <= OPTIONS
        if own.source.is_loaded or not is_plain:
            return own.real()(*args, **options)
        special = options.get("add_special_tokens", True)
        return {"input_ids": own.backend.encode(args[0], add_special_tokens=special).ids}

    def __len__(self) -> int:
        own = own_of(self)
        if own.source.is_loaded:
            return len(own.real())
        return int(own.backend.get_vocab_size(with_added_tokens=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokenizer(Own):
    """backend: the tokenizer of the library tokenizers."""

    source: Source
    backend: Any
    values: Mapping[str, Any]

    def real(self) -> Any:
        return self.source.real()

    def kept(self, owner: Any, name: str) -> Any:
        if name in self.values:
            return self.values[name]
        if name == "added_tokens_decoder":
            return self.backend.get_added_tokens_decoder()
        if name == "backend_tokenizer":
            return self.backend
        return getattr(self, f"_{name}") if name in METHODS else NotImplemented

    def _get_vocab(self) -> Any:
        return self.backend.get_vocab(with_added_tokens=True)

    def _get_added_vocab(self) -> dict[str, int]:
        added = self.backend.get_added_tokens_decoder()
        return {added[key].content: key for key in sorted(added)}

    def _convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        if skip_special_tokens:
            return self.real().convert_ids_to_tokens(ids, skip_special_tokens=True)
        if isinstance(ids, int):
            return self.backend.id_to_token(ids)
        return [self.backend.id_to_token(int(each)) for each in ids]

    def _convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        return self._id(tokens) if isinstance(tokens, str) else [self._id(each) for each in tokens]

    def _id(self, token: str) -> Any:
        found = self.backend.token_to_id(token)
        return self.values["unk_token_id"] if found is None else found

    def _decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        is_plain = type(token_ids) in (list, tuple) and all(type(each) is int for each in token_ids)
        if not is_plain or options != {"clean_up_tokenization_spaces": False}:
            return self.real().decode(token_ids, skip_special_tokens=skip_special_tokens, **options)
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


METHODS = frozenset(
    ("convert_ids_to_tokens", "convert_tokens_to_ids", "decode", "get_added_vocab", "get_vocab")
)


def tokenizer_stand_in(values: Mapping[str, Any], source: Source) -> Any:
    """Makes the stand-in of a tokenizer from what `describe_tokenizer` has returned. source: loads
    the tokenizer."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(values["backend"])
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = values["splits"]
    kept = {name: unplain(value) for name, value in values["values"].items()}
    return TokenizerStandIn(_Tokenizer(source=source, backend=backend, values=kept))
