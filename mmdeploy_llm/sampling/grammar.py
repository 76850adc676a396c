"""Guided decoding: constraints compiled by xgrammar, which is an optional extra."""

from __future__ import annotations

import importlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from mmdeploy_llm.errors import ConfigError, RequestError
from mmdeploy_llm.params import GuidedDecodingParams

MAX_COMPILED = 64
# xgrammar's messages begin with the time and the place in its source: of no use to the caller.
SOURCE_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")
MAX_TEXT = 100_000  # characters of a schema, a regular expression or a grammar


class GrammarBackend:
    """Compiles constraints for one tokenizer; the last MAX_COMPILED of them are kept.

    tokenizer: a transformers tokenizer. Safe for use from several threads. xgrammar is imported
    when the first constraint comes.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._compiler: Any = None
        self._lock = threading.Lock()

    def validate(self, guided: GuidedDecodingParams) -> None:
        """Compiles the constraint. Raises RequestError for a bad one, ConfigError without
        xgrammar."""
        self._compile(guided)

    def matcher(self, guided: GuidedDecodingParams) -> GrammarMatcher:
        """Follows one request's output through the constraint. Raises as `validate`."""
        compiled, xgrammar = self._compile(guided), self._module()
        return GrammarMatcher(
            xgrammar, xgrammar.GrammarMatcher(compiled, override_stop_tokens=self._stops())
        )

    def _stops(self) -> list[int] | None:
        return self._eos_token_ids or None

    def _compile(self, guided: GuidedDecodingParams) -> Any:
        key = guided.model_dump_json()
        if len(key) > MAX_TEXT:
            raise RequestError(
                f"the guided_decoding constraint has {len(key)} characters, {MAX_TEXT} are allowed"
            )
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key]
            try:
                compiled = _compiled(self._make_compiler(), guided)
            except (RuntimeError, ValueError, TypeError) as error:
                reason = SOURCE_PLACE.sub("", str(error).strip())
                raise RequestError(
                    f"the guided_decoding constraint cannot be used: {reason}"
                ) from error
            self._compiled[key] = compiled
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            return compiled

    def _make_compiler(self) -> Any:
        if self._compiler is None:
            xgrammar = self._module()
            info = xgrammar.TokenizerInfo.from_huggingface(
                self._tokenizer, vocab_size=self._vocab_size, stop_token_ids=self._stops()
            )
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        return self._compiler

    @staticmethod
    def _module() -> Any:
        try:
            return importlib.import_module("xgrammar")
        except ImportError as error:
            raise ConfigError(
                f"guided_decoding needs xgrammar ({error}); pip install mmdeploy-llm[guided]"
            ) from error


class GrammarMatcher:
    """Where one request's output stands in its constraint."""

    def __init__(self, xgrammar: Any, matcher: Any) -> None:
        self._xgrammar = xgrammar
        self._matcher = matcher
        self._bitmask: Tensor | None = None

    def mask(self, logits: Tensor) -> None:
        """Sets all tokens of `logits` [V] to -inf that the constraint does not allow next."""
        if self._matcher.is_terminated():
            return
        if self._bitmask is None:
            self._bitmask = self._xgrammar.allocate_token_bitmask(1, logits.shape[-1])
        self._matcher.fill_next_token_bitmask(self._bitmask)
        bitmask = self._bitmask.to(logits.device)
        self._xgrammar.apply_token_bitmask_inplace(logits[None], bitmask)

    def accept(self, token_id: int) -> None:
        """Takes the next token of the output."""
        if not self._matcher.is_terminated():
            self._matcher.accept_token(token_id)


def _compiled(compiler: Any, guided: GuidedDecodingParams) -> Any:
    if guided.json_schema is not None:
        schema = guided.json_schema
        return compiler.compile_json_schema(
            schema if isinstance(schema, str) else json.dumps(schema)
        )
    if guided.regex is not None:
        return compiler.compile_regex(guided.regex)
    if guided.grammar is not None:
        return compiler.compile_grammar(guided.grammar)
    if guided.choice is not None:
        options = " | ".join(json.dumps(text, ensure_ascii=False) for text in guided.choice)
        return compiler.compile_grammar(f"root ::= {options}")
    return compiler.compile_builtin_json_grammar()
