"""Guided decoding with llguidance, an optional dependency that is imported by the first request
with guided_decoding."""

from __future__ import annotations

import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.engine.runner.sampling.grammars import (
    Constraint,
    Probe,
    Vocabulary,
    ignored_formats,
    read_constraint,
    translate,
    wrong,
)
from mmdeploy_llm.engine.runner.sampling.grammars.probe import SECONDS, compiled
from mmdeploy_llm.engine.runner.sampling.grammars.tags import KIND as STRUCTURAL_TAG
from mmdeploy_llm.engine.runner.sampling.grammars.tags import split_special
from mmdeploy_llm.engine.runner.sampling.grammars.vocabulary import llguidance
from mmdeploy_llm.errors import ConfigError, EngineError
from mmdeploy_llm.hooks import ReasoningParser
from mmdeploy_llm.layers.transfer import to_device
from mmdeploy_llm.values.params import GuidedDecodingParams

from .guide import Guide, Thoughts
from .matcher import GrammarMatcher
from .token_texts import BITS, TokenTexts

logger = logging.getLogger(__name__)

CACHE_SIZE = 64  # compiled grammars


def ban_tokens(logits: Tensor, guides: Mapping[int, Guide]) -> None:
    """Sets the logits of the tokens that constraints ban next to -inf, in place. logits: [N, V].
    guides: by row.

    A byte of a mask becomes the limits of eight logits by one look into a table, inf or -inf: a
    seventh of the time of a mask with a value for each token.
    """
    num_rows, vocab_size = len(guides), logits.shape[1]
    mask = torch.full((num_rows, -(-vocab_size // BITS)), -1, dtype=torch.int32)
    for index, guide in enumerate(guides.values()):
        guide.fill(mask, index)
    limits = _limits_by_byte(logits)
    own = to_device(mask, logits.device).view(torch.uint8)
    for index, row in enumerate(guides):
        limit = limits.index_select(0, own[index].int()).flatten()[:vocab_size]
        torch.minimum(logits[row], limit, out=logits[row])


def _limits_by_byte(logits: Tensor) -> Tensor:
    """Returns [256, 8] like `logits`: for each byte of a mask, inf where its bits allow a token and
    -inf where they ban it."""
    values = torch.arange(256, device=logits.device)[:, None]
    allows = values >> torch.arange(8, device=logits.device) & 1
    return torch.where(allows > 0, torch.inf, -torch.inf).to(logits.dtype)


class GrammarBackend:
    """Compiles constraints for one model into matchers, and caches the last 64 compiled grammars.

    tokenizer: transformers' fast tokenizer. vocab_size: width of the logits. seconds: limit for one
    grammar. new_parser: builds a request's reasoning parser, which says where the answer begins;
    None: all text is answer. Thread-safe. A process that compiles grammars first starts when it is
    first needed.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_token_ids: Collection[int],
        seconds: float = SECONDS,
        new_parser: Callable[[], ReasoningParser] | None = None,
    ) -> None:
        self._raw = tokenizer
        self._new_parser = new_parser
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(sorted(eos_token_ids))
        self._seconds = seconds
        self._reading = threading.Lock()  # held while the tokenizer is read
        self._lock = threading.Lock()  # guards the fields below
        self._is_closed = False
        self._noted: set[str] = set()
        self._probe: Probe | None = None
        self._tokenizer: Any = None
        self._texts: Sequence[bytes] = ()
        self._visible: dict[tuple[str, ...], TokenTexts] = {}
        self._special_ids: dict[str, int] = {}
        self._compiled: OrderedDict[Constraint, Any] = OrderedDict()

    def validate(self, params: GuidedDecodingParams) -> None:
        """Tries the constraint in another process, then compiles it into the cache. Raises
        RequestError for an invalid constraint, and for one that takes too long; ConfigError when
        llguidance is missing or cannot read the model's tokenizer."""
        constraint = read_constraint(params)
        probe = self._started_probe()
        self._ready()
        with self._lock:
            if constraint in self._compiled:
                self._compiled.move_to_end(constraint)
                return
        translated = functools.cache(partial(translate, constraint, self._special_ids))
        probe.check(constraint, translated)
        self._compile(constraint, translated())
        self._warn(ignored_formats(constraint))

    def guide(self, params: GuidedDecodingParams, prompt: str = "") -> Guide:
        """Returns the guide of a text that follows the prompt, by a constraint that `validate`
        accepted, in this process or in that of another rank. Raises RequestError for one that
        cannot be compiled; what a parser raises."""
        matcher = self._matcher(params)
        if self._new_parser is None:
            return Guide(matcher, texts=self._texts)
        parser = self._new_parser()
        texts = self._texts_with(parser.markers)
        thoughts = Thoughts(parser, texts, self._eos_token_ids, matcher, prompt)
        return Guide(matcher, thoughts, self._texts)

    def matches(self, params: GuidedDecodingParams, text: str) -> bool:
        """Whether a text is what a constraint asks for."""
        return self._matcher(params).matches(text)

    def _warn(self, formats: frozenset[str]) -> None:
        """Says once for each format of a schema that it is a note."""
        with self._lock:
            fresh = formats - self._noted
            self._noted |= fresh
        for name in sorted(fresh):
            logger.warning("the format %r in a JSON schema is a note: texts are not checked", name)

    def _matcher(self, params: GuidedDecodingParams) -> GrammarMatcher:
        """Returns a matcher at the start of a constraint."""
        self._ready()
        constraint = read_constraint(params)
        with self._lock:
            found = self._compiled.get(constraint)
            if found is not None:
                self._compiled.move_to_end(constraint)
        if found is None:
            found = self._compile(constraint, translate(constraint, self._special_ids))
        return GrammarMatcher(
            found.deep_copy(),
            self._eos_token_ids,
            forget=partial(self._forget, constraint, found),
            encode=partial(self._encoded, reads_special=constraint.kind == STRUCTURAL_TAG),
        )

    def _encoded(self, text: str, *, reads_special: bool) -> list[int]:
        """Returns the ids of a text. reads_special: texts of special tokens become these."""
        pieces = split_special(text, self._special_ids) if reads_special else [text]
        ids: list[int] = []
        for piece in pieces:
            token_id = self._special_ids.get(piece) if reads_special else None
            ids += self._tokenizer.tokenize_str(piece) if token_id is None else [token_id]
        return ids

    def _texts_with(self, markers: tuple[str, ...]) -> TokenTexts:
        """Returns the texts of the tokens as delivery shows them: special ones only where they are
        markers of a parser."""
        with self._lock:
            found = self._visible.get(markers)
        if found is None:
            hidden = {i for text, i in self._special_ids.items() if text not in markers}
            found = TokenTexts(self._texts, hidden.union(self._eos_token_ids))
            with self._lock:
                self._visible[markers] = found
        return found

    def interrupt(self) -> None:
        """Ends a check that is under way, so that `close` need not wait."""
        with self._lock:
            self._is_closed = True
            if self._probe is not None:
                self._probe.interrupt()

    def close(self) -> None:
        """Ends the process that tries grammars. Later calls of `validate` raise EngineError."""
        self.interrupt()
        if self._probe is not None:
            self._probe.close()

    def _compile(self, constraint: Constraint, grammar: str) -> Any:
        """Compiles a grammar into the cache, without the lock: running requests do not wait."""
        found = compiled(self._tokenizer, grammar)
        if isinstance(found, str):
            raise wrong(constraint, found)
        with self._lock:
            self._compiled[constraint] = found
            if len(self._compiled) > CACHE_SIZE:
                self._compiled.popitem(last=False)
        return found

    def _forget(self, constraint: Constraint, found: Any) -> None:
        """Removes a grammar from the cache: all of its matchers share the automaton that they
        extend, and its limit. The next request begins with another."""
        with self._lock:
            if self._compiled.get(constraint) is found:
                del self._compiled[constraint]

    def _started_probe(self) -> Probe:
        """Returns the probe; its process starts while this one reads the tokenizer."""
        with self._lock:
            if self._is_closed:
                raise EngineError("this LLM is closed; make a new one")
            if self._probe is None:
                llguidance()
                self._probe = Probe(self._vocabulary(), self._seconds)
            return self._probe

    def _ready(self) -> None:
        """Reads the tokenizer, once."""
        with self._reading:
            if self._tokenizer is None:
                llguidance()
                added = getattr(self._raw, "added_tokens_decoder", {})
                self._special_ids = {
                    token.content: token_id for token_id, token in added.items() if token.special
                }
                self._tokenizer, self._texts = self._vocabulary().read()

    def _vocabulary(self) -> Vocabulary:
        if not self._eos_token_ids:
            raise ConfigError(
                "guided decoding needs a model with an end-of-sequence token, this one has none; "
                "set eos_token_id in its generation_config.json"
            )
        fast = getattr(self._raw, "backend_tokenizer", None)
        if fast is None:
            raise ConfigError(
                "guided decoding cannot read the tokenizer of this model: it needs tokenizer.json"
            )
        return Vocabulary(
            tokenizer=fast.to_str(),
            size=max(self._vocab_size, fast.get_vocab_size(with_added_tokens=True)),
            eos_token_ids=self._eos_token_ids,
        )
