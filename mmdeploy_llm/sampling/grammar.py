"""Guided decoding with xgrammar, an optional dependency that is imported in this file only, by the
first request with guided_decoding."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.errors import ConfigError, RequestError
from mmdeploy_llm.params import GuidedDecodingParams
from mmdeploy_llm.transfer import to_device

CACHE_SIZE = 64  # compiled grammars
MAX_GRAMMAR_CHARACTERS = 100_000
MAX_SCHEMA_DEPTH = 100  # xgrammar's time grows with the cube of the depth
SOURCE_LOCATION = re.compile(r"^\[[\d:]+\] \S+?:\d+: ")  # prefix of xgrammar's messages
BITS = 32  # tokens in one word of a mask


class GrammarMatcher:
    """The state of one request in its grammar. Its SlotState is the only writer."""

    def __init__(self, matcher: Any, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._eos_token_ids = tuple(eos_token_ids)

    def accept(self, token_id: int) -> None:
        """Advances by the next token, which `fill` allowed. Ignores tokens after the grammar's
        end."""
        if not self._matcher.is_terminated():
            assert self._matcher.accept_token(token_id), f"token {token_id} was not allowed"

    def fill(self, mask: Tensor, row: int) -> None:
        """Writes which tokens are allowed next as bits of mask[row], int32 [ceil(V / 32)] on the
        host; only end-of-sequence tokens after the grammar's end."""
        if not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(mask, row)
            return
        words = [0] * mask.shape[1]
        for token_id in self._eos_token_ids:
            words[token_id // BITS] |= 1 << token_id % BITS
        mask[row] = torch.tensor(words, dtype=torch.uint32).view(torch.int32)


def banned_mask(
    matchers: Sequence[GrammarMatcher], vocab_size: int, device: torch.device
) -> Tensor:
    """Returns [len(matchers), V] bool on `device`: the tokens that each grammar bans next."""
    mask = torch.full((len(matchers), -(-vocab_size // BITS)), -1, dtype=torch.int32)
    for row, matcher in enumerate(matchers):
        matcher.fill(mask, row)
    shifts = torch.arange(BITS, dtype=torch.int32, device=device)
    bits = to_device(mask, device)[:, :, None] >> shifts & 1
    return bits.flatten(1)[:, :vocab_size] == 0


class GrammarBackend:
    """Compiles constraints for one model into matchers, and caches the last 64 compiled grammars.

    tokenizer: transformers' fast tokenizer. vocab_size: width of the logits. Thread-safe.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._compiler: Any = None
        self._compiled: OrderedDict[tuple[str, str], Any] = OrderedDict()

    def validate(self, params: GuidedDecodingParams) -> None:
        """Compiles the constraint into the cache. Raises RequestError for an invalid constraint,
        ConfigError when xgrammar is missing or cannot read the model's tokenizer."""
        self._compile(params)

    def matcher(self, params: GuidedDecodingParams) -> GrammarMatcher:
        """Returns a matcher at the start of the constraint. Raises as `validate` does."""
        compiled = self._compile(params)
        return GrammarMatcher(_xgrammar().GrammarMatcher(compiled), self._eos_token_ids)

    def _compile(self, params: GuidedDecodingParams) -> Any:
        kind, text = _source(params)
        if len(text) > MAX_GRAMMAR_CHARACTERS:
            raise RequestError(
                f"guided_decoding.{kind} has {len(text)} characters, {MAX_GRAMMAR_CHARACTERS} are "
                "allowed; shorten it"
            )
        with self._lock:
            compiler = self._compiler = self._compiler or self._make_compiler()
            if (kind, text) in self._compiled:
                self._compiled.move_to_end((kind, text))
                return self._compiled[kind, text]
        # Outside the lock: a grammar may take seconds, and running requests must not wait for it.
        compiled = _compile(compiler, kind, text)
        with self._lock:
            self._compiled[kind, text] = compiled
            if len(self._compiled) > CACHE_SIZE:
                self._compiled.popitem(last=False)
        return compiled

    def _make_compiler(self) -> Any:
        xgrammar = _xgrammar()
        if not self._eos_token_ids:
            raise ConfigError(
                "guided decoding needs a model with an end-of-sequence token, this one has none; "
                "set eos_token_id in its generation_config.json"
            )
        try:
            vocabulary = xgrammar.TokenizerInfo.from_huggingface(
                self._tokenizer, vocab_size=self._vocab_size, stop_token_ids=self._eos_token_ids
            )
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"guided decoding cannot read the tokenizer of this model: {error}"
            ) from error
        return xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)


def _source(params: GuidedDecodingParams) -> tuple[str, str]:
    """Returns the field name of the constraint and its text."""
    if params.json_schema is not None:
        return "json", _schema_text(params.json_schema)
    if params.choice is not None:
        return "choice", _choice_grammar(params.choice)
    if params.regex is not None:
        return "regex", params.regex
    if params.grammar is not None:
        return "grammar", params.grammar
    return "json_object", ""


def _schema_text(schema: dict[str, Any] | str) -> str:
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        text = schema if isinstance(schema, str) else json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"guided_decoding.json is not JSON: {error}") from error
    level, depth = [parsed], 0
    while level:
        depth += 1
        level = [child for node in level for child in _children(node)]
    if depth > MAX_SCHEMA_DEPTH:
        raise RequestError(
            f"guided_decoding.json is nested {depth} levels deep, {MAX_SCHEMA_DEPTH} are allowed; "
            "make it flatter, with $defs and $ref"
        )
    return text


def _children(node: Any) -> Collection[Any]:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list | tuple) else ()


def _choice_grammar(choices: Sequence[str]) -> str:
    """Returns an EBNF grammar of exactly these texts; control characters and quotes are escaped as
    in JSON."""
    return "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in choices)


def _compile(compiler: Any, kind: str, text: str) -> Any:
    compilers: dict[str, Callable[[], Any]] = {
        "json": lambda: compiler.compile_json_schema(text, strict_mode=False),
        "choice": lambda: compiler.compile_grammar(text),
        "regex": lambda: compiler.compile_regex(text),
        "grammar": lambda: compiler.compile_grammar(text),
        "json_object": compiler.compile_builtin_json_grammar,
    }
    try:
        return compilers[kind]()
    except (TypeError, ValueError, RuntimeError) as error:
        reason = SOURCE_LOCATION.sub("", str(error))
        raise RequestError(f"guided_decoding.{kind} is not valid: {reason}") from error


def _xgrammar() -> ModuleType:
    try:
        import xgrammar
    except ImportError as error:
        raise ConfigError(
            f"guided_decoding needs xgrammar, which cannot be imported ({error}); "
            "run: pip install mmdeploy_llm[guided]"
        ) from error
    module: ModuleType = xgrammar
    return module
