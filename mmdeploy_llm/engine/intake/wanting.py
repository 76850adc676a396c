"""Wanting: what intake does for requests that want no text: fills in what they want by the model's
rules, and writes instructions, media and pairs into their prompts."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mmdeploy_llm.errors import PromptTooLongError, RequestError
from mmdeploy_llm.layers.pooling.abilities import Abilities
from mmdeploy_llm.layers.pooling.rules import PairRule
from mmdeploy_llm.messages import MediaItem
from mmdeploy_llm.values.deadline import Deadline
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.pooling_request import PoolingRequest
from mmdeploy_llm.values.prompt import ChatMessage, MediaPart, Part, PromptParts, TextPart

from .defaults import ParamsResolver
from .fitting import Ids, long_text
from .placeholders import Placeholders
from .prompts import PromptReader
from .tokenizer import PromptTokenizer
from .whole_prompts import whole_prompt

PAIR_KEYS = ("query", "document")
FIELD = re.compile(r"\{(query|document|instruction)\}")
NO_TEXT = (
    "this model gives {}, it cannot generate text; call LLM.{}, or load a model that generates"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A prompt that was read. params: returns the params of so many tokens, every field filled;
    raises PromptTooLongError. arrival_time: when it was begun, in epoch seconds."""

    parts: PromptParts
    wanted: PoolingRequest | None
    params: Callable[[int], SamplingParams]
    arrival_time: float
    windows: tuple[list[int], ...] = ()  # ids of a text that is read in several


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """How media stand in texts. check_media: refuses media that the model does not take. written:
    returns what stands for so many items of a kind in a text."""

    check_media: Callable[[Sequence[MediaItem]], None]
    written: Callable[[str, int], str]
    placeholders: Placeholders
    tokenizer: PromptTokenizer


class Wanting:
    """Prepares requests that want vectors or scores, for one model.

    prompts: reads them. max_model_len: longest prompt. params: of requests for text.
    """

    def __init__(
        self,
        abilities: Abilities,
        prompts: PromptReader,
        max_model_len: int,
        params: ParamsResolver,
        writing: Writing,
    ) -> None:
        self._abilities, self._rules, self._params = abilities, abilities.rules, params
        self._max_tokens = min(max_model_len, self._rules.max_tokens or max_model_len)
        self._prompts, self._written = prompts, writing.written
        self._check_media = writing.check_media
        self._placeholders, self._tokenizer = writing.placeholders, writing.tokenizer

    def begin(
        self,
        prompt: Any,
        params: SamplingParams,
        wanted: PoolingRequest | None,
        number: int,
        where: str,
        deadline: Deadline | None,
    ) -> Begun:
        """Reads a prompt and checks what is wanted of it. number: see ParamsResolver. where,
        deadline: see PromptReader. Raises RequestError and its subclasses."""
        now = time.time()
        if deadline is not None:
            deadline.check("it waited to be prepared")
        if wanted is None:
            parts = self._prompts.read(prompt, where, deadline)
            self.check_text()
            self._params.check(params)
            resolve = partial(self._params.resolve, params, number=number)
        else:
            parts, wanted = self.read(prompt, self.resolved(wanted, params), where, deadline)
            resolve = partial(self.sized, params)
        begun = Begun(parts=parts, wanted=wanted, params=resolve, arrival_time=now)
        return self._fitting(begun, wanted) if wanted and wanted.too_long != "error" else begun

    def _fitting(self, begun: Begun, wanted: PoolingRequest) -> Begun:
        """Returns the prompt of a text cut to the tokens that the model reads, or in windows."""
        if begun.parts.text is None or begun.parts.pair is not None or begun.parts.media:
            return begun
        prefix, suffix = map(self._cased, self._rules.around(wanted.instruction))
        whole, most = begun.parts.text or "", self._abilities.text_length or self._max_tokens
        text = whole.removeprefix(prefix).removesuffix(suffix)
        found = long_text(self._tokenizer, prefix, text, suffix, most)
        if found is None:
            return begun
        count = len(found.before) + len(found.body) + len(found.after)
        told = f"the text has {count} tokens and the model reads {most}: "
        if wanted.too_long == "chunk":
            windows = tuple(list(self._padded(own)) for own in found.windows())
            return replace(
                begun,
                parts=replace(begun.parts, text=None, ids=tuple(windows[0])),
                wanted=replace(
                    wanted,
                    num_windows=len(windows),
                    notes=(f"{told}its vector is the mean of {len(windows)} windows",),
                ),
                windows=windows,
            )
        ids = found.cut(at_start=self._tokenizer.raw.truncation_side == "left")
        parts = replace(begun.parts, text=None, ids=ids)
        notes = (f"{told}{count - len(ids)} were cut",)
        return replace(begun, parts=parts, wanted=replace(wanted, notes=notes))

    def check_text(self) -> None:
        """Raises RequestError unless the model generates text."""
        own = self._abilities
        if not own.can_generate:
            words = ("vectors", "embed") if own.can_embed else ("scores of pairs", "rerank")
            raise RequestError(NO_TEXT.format(*words))

    def resolved(self, wanted: PoolingRequest, params: SamplingParams) -> PoolingRequest:
        """Returns what is wanted with every open field filled. Raises RequestError for what the
        model cannot give, and for params, which a prompt without output does not have."""
        own, rules = self._abilities, self._rules
        given = sorted(params.model_fields_set)
        if given:
            raise RequestError(
                f"a request for vectors or scores generates nothing, so sampling parameters "
                f"({', '.join(given)}) have no meaning; leave them out"
            )
        if wanted.dimensions is not None and wanted.dimensions < 1:
            raise RequestError(f"dimensions must be 1 or more, got {wanted.dimensions}")
        if wanted.what == "score":
            if not own.can_score:
                raise RequestError(
                    "this model has no head that scores; LLM.rerank compares vectors instead"
                )
        elif wanted.what == "likelihood":
            self.check_text()
        elif not own.can_embed:
            raise RequestError("this model scores pairs and gives no vectors; call LLM.rerank")
        pooling = wanted.pooling or rules.pooling or own.pooling or "last"
        what = wanted.what or ("token_vectors" if pooling == "tokens" else "vector")
        dimensions = wanted.dimensions or rules.dimensions
        return replace(
            wanted,
            what=what,
            pooling="last" if pooling == "tokens" else pooling,
            normalize=rules.normalize if wanted.normalize is None else wanted.normalize,
            dimensions=dimensions,
            is_cut_last=wanted.normalize is None and dimensions is not None,
            instruction=own.instruction_of(wanted),
        )

    def sized(self, params: SamplingParams, num_tokens: int) -> SamplingParams:
        """Returns the params of a request without output. Raises PromptTooLongError."""
        if num_tokens > self._max_tokens:
            raise PromptTooLongError(
                f"the prompt has {num_tokens} tokens, {self._max_tokens} are allowed; shorten it "
                "or its media, or raise max_model_len where the model allows it"
            )
        return params.model_copy(update={"max_tokens": 1, "seed": 0})

    def labelled(self, wanted: PoolingRequest | None, ids: list[int]) -> PoolingRequest | None:
        """Appends the label to the ids of a prompt whose likelihood is wanted. Raises RequestError
        for one without tokens."""
        if wanted is None or wanted.label is None:
            return wanted
        own = self._tokenizer.encode(wanted.label)
        if not own:
            raise RequestError(f"the label {wanted.label!r} has no tokens; give at least a letter")
        if any(self._placeholders.count_in_ids(own).values()):
            raise RequestError(f"the label {wanted.label!r} has a marker of media; leave it out")
        num_skipped = len(ids)
        ids.extend(own)
        return replace(wanted, num_skipped=num_skipped)

    def read(
        self, prompt: Any, wanted: PoolingRequest, where: str, deadline: Deadline | None
    ) -> tuple[PromptParts, PoolingRequest]:
        """Reads a prompt, which may be media alone, or a pair of prompts {"query", "document"}, and
        writes its instruction into it."""
        if wanted.what == "score":
            return self._pair(prompt, wanted), wanted
        parts, rules = self._read(prompt, where, deadline), self._rules
        if wanted.what == "likelihood":
            return parts, wanted
        known = self._placeholders
        whole = whole_prompt(parts.text, parts.media, known.markers, known.alone)
        if whole is not None:
            return replace(parts, text=None, ids=whole), wanted
        if parts.messages is not None:
            return self._with_system(parts, wanted), wanted
        if parts.ids is not None:  # they are the whole prompt
            if wanted.instruction not in (None, rules.query_prompt, rules.document_prompt):
                raise RequestError("token ids are a whole prompt; write the instruction into them")
            return parts, wanted
        if rules.system is not None:
            return self._conversation(parts, self._system(wanted.instruction)), wanted
        prefix, suffix = rules.around(wanted.instruction)
        skipped = 0
        if prefix and not rules.includes_prompt:
            own, empty = map(self._tokenizer.encode_prompt, (prefix, ""))
            has_end = bool(empty) and own[-1] == empty[-1]  # a special token after every text
            skipped = len(own) - has_end
        text = self._cased(prefix + self._marked(parts) + suffix)
        parts, length = replace(parts, text=text), self._abilities.text_length
        if length is not None:
            own = self._tokenizer.encode_prompt(text)
            if wanted.too_long == "error" or len(own) <= length:
                parts = replace(parts, text=None, ids=self._padded(own))
        return parts, replace(wanted, num_skipped=skipped)

    def _padded(self, ids: Sequence[int]) -> Ids:
        """Returns ids with padding to the length that the model's texts have, if they have one."""
        missing = (self._abilities.text_length or 0) - len(ids)
        return (*ids, *[self._tokenizer.raw.pad_token_id] * missing)

    def _read(self, prompt: Any, where: str = "", deadline: Deadline | None = None) -> PromptParts:
        parts = self._prompts.read(prompt, where, deadline)
        if parts.text is None and parts.ids is None and parts.messages is None:
            parts = replace(parts, text="")
        if parts.text is not None and not (parts.media or parts.text.strip()):
            raise RequestError("the prompt is empty; give a text, or an image or other media")
        return parts

    def _cased(self, text: str) -> str:
        return text.lower() if self._rules.lower_case else text

    def _system(self, instruction: str | None) -> str:
        if instruction is None:
            return self._rules.system or ""
        return self._rules.prompts.get(instruction, instruction)

    def _marked(self, parts: PromptParts) -> str:
        """Returns the text of a prompt, after the markers of its media unless it has any."""
        text = parts.text or ""
        self._check_media(parts.media)
        if not parts.media or any(self._placeholders.count_in_text(text).values()):
            return text
        return "".join(self._written(item.kind, 1) for item in parts.media) + text

    def _conversation(self, parts: PromptParts, system: str) -> PromptParts:
        """Returns a conversation of one message with the media and the text."""
        messages = (*system_message(system), _message("user", _content(parts)))
        kwargs = {**self._rules.chat_options, **(parts.template_kwargs or {})}
        return replace(parts, text=None, messages=messages, template_kwargs=kwargs or None)

    def _with_system(self, parts: PromptParts, wanted: PoolingRequest) -> PromptParts:
        """Returns a conversation with its instruction as the system message."""
        messages = parts.messages or ()
        system = self._system(wanted.instruction)
        if not system or messages[0].role == "system":
            if wanted.instruction is not None:
                raise RequestError(
                    "the conversation has a system message already; leave out the instruction"
                )
            return parts
        return replace(parts, messages=(*system_message(system), *messages))

    def _pair(self, prompt: Mapping[str, Any], wanted: PoolingRequest) -> PromptParts:
        rule = self._rules.pairs or PairRule()
        query, document = (self._read(prompt.get(name)) for name in PAIR_KEYS)
        for name, own in zip(PAIR_KEYS, (query, document), strict=True):
            if own.text is None:
                raise RequestError(f"the {name} of a pair must be a text, with or without media")
        media = (*query.media, *document.media)
        if rule.has_roles:
            return self._roles(query, document, wanted)
        if rule.template is None:
            if media:
                raise RequestError("this model scores pairs of texts, without media")
            first = self._rules.around(wanted.instruction)[0] + (query.text or "")
            return PromptParts(text=self._cased(first), pair=self._cased(document.text or ""))
        values = {"instruction": wanted.instruction or rule.instruction}
        if rule.system is None:
            values |= {"query": self._marked(query), "document": self._marked(document)}
            text = FIELD.sub(lambda found: values[found[1]], rule.template)
            return PromptParts(text=text, media=media)
        return self._filled(rule, query, document, values)

    def _roles(
        self, query: PromptParts, document: PromptParts, wanted: PoolingRequest
    ) -> PromptParts:
        """Returns the messages of a template that knows the roles "query" and "document"."""
        messages = (
            *system_message(self._system(wanted.instruction)),
            _message("query", _content(query)),
            _message("document", _content(document)),
        )
        media, options = (*query.media, *document.media), self._rules.chat_options or None
        return PromptParts(messages=messages, media=media, template_kwargs=options)

    def _filled(
        self, rule: PairRule, query: PromptParts, document: PromptParts, values: dict[str, str]
    ) -> PromptParts:
        """Returns a conversation whose user message is the template, filled."""
        content: list[Part] = []
        sides = {"query": query, "document": document}
        for index, piece in enumerate(FIELD.split(rule.template or "")):
            if index % 2 and piece in sides:
                content += _content(sides[piece])
            else:
                content += text_parts(values[piece] if index % 2 else piece)
        messages = (*system_message(rule.system), _message("user", content))
        return PromptParts(messages=messages, media=(*query.media, *document.media))


def system_message(text: str | None) -> tuple[ChatMessage, ...]:
    """Returns the messages of an instruction: one, or none for no text."""
    return (_message("system", text_parts(text)),) if text else ()


def text_parts(text: str | None) -> tuple[TextPart, ...]:
    """Returns the parts of a text: one, or none for no text."""
    return (TextPart(text=text),) if text else ()


def _message(role: str, content: Sequence[Part]) -> ChatMessage:
    return ChatMessage(fields={"role": role}, content=tuple(content))


def _content(parts: PromptParts) -> tuple[Part, ...]:
    """Returns the parts of a message: places for the media of a prompt, then its text."""
    media = (MediaItem(kind=item.kind, source=None, options={}) for item in parts.media)
    return (*(MediaPart(item=own, path="") for own in media), *text_parts(parts.text))
