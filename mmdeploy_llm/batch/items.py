"""Turns one line of a batch into an Item: checks its keys, resolves its media paths and completes
its sampling parameters. A line looks like this:

{"id": "a", "prompt" | "prompt_token_ids" | "messages": ..., "multimodal_data": {...},
 "sampling_params": {...}, "ask": {name: question}, ...}

The other keys are those of a prompt's dict: engine/intake/prompts.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmdeploy_llm.batch.questions.asks import questions_about, read_asks
from mmdeploy_llm.data.records.identity import digest_of, file_paths, file_state
from mmdeploy_llm.data.records.item import Item, Media
from mmdeploy_llm.data.rows.names import BUILT_IN_KINDS, is_url
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.engine.intake.prompts import CONTENT_KEYS, MEDIA_KEYS, PROMPT_KEYS, hint_of_key
from mmdeploy_llm.errors import MMDeployLLMError, RequestError
from mmdeploy_llm.hooks import KindTable
from mmdeploy_llm.media.loading.expanding import PartExpander
from mmdeploy_llm.messages import MEDIA_KINDS
from mmdeploy_llm.values.params import SamplingParams

KNOWN_KEYS = ("id", *PROMPT_KEYS, "sampling_params", "ask")
TEMPLATE_MARK = re.compile(r"\{[{%]")
SYSTEM_ROLES = ("system", "developer")
DRAWS = ("temperature", "top_p", "top_k", "min_p", "n")  # they choose how tokens are drawn
DATA_URL = "(data: URL)"  # in place of the name of media that are inside a line
MAX_QUESTION = 200  # characters of the question that a record repeats


class ItemReader:
    """Builds items from the parsed values of lines.

    folder: base of relative media paths; None leaves them as they are.
    defaults: sampling parameters that a line does not set itself.
    template_kwargs: chat_template_kwargs that a line does not set itself.
    system: the system message of messages that have none.
    kinds: of media, whose paths are resolved.
    """

    def __init__(
        self,
        folder: str | None,
        defaults: SamplingParams,
        template_kwargs: Mapping[str, Any] | None = None,
        system: str | None = None,
        kinds: KindTable = BUILT_IN_KINDS,
    ) -> None:
        self._folder, self._kinds, self._expander = folder, kinds, PartExpander(kinds)
        self._defaults = defaults
        self._template_kwargs = dict(template_kwargs or {})
        self._system = system

    def read(
        self,
        line: int,
        values: Any,
        *,
        folder: str | None = None,
        names: Sequence[str | None] = (),
        columns: Mapping[str, Any] | None = None,
        endpoint: str = "",
    ) -> Item | BadItem:
        """Returns the item of a line, or a BadItem that says what is wrong with the line.

        folder: base of its relative media paths, instead of the reader's. names: of its media, for
        those that have no path. columns: see Item.
        """
        item_id: str | int | None = None
        try:
            fields = _as_fields(values)
            item_id = _id_of(fields, line)
            _check_keys(fields)
            base = self._folder if folder is None else folder
            media = _Media(base, self._kinds, self._expander)
            prompt = self._prompt(fields, media)
            asked = fields.get("ask")
            questions = () if asked is None else questions_about(prompt, read_asks(asked))
            prompt = dict(questions[0].prompt) if questions else prompt
            carried = {"columns": columns} if columns else {}
            return Item(
                line=line,
                id=item_id,
                prompt=prompt,
                params=self._params(fields.get("sampling_params")),
                media=_named(media.found, names),
                question=_question(prompt),
                digest=digest_of({**fields, **carried}, *map(file_state, media.files)),
                columns=columns or {},
                questions=questions,
                endpoint=endpoint,
            )
        except (MMDeployLLMError, RecursionError) as error:
            message = str(error) or "the line is nested too deeply"
            return BadItem(line=line, id=item_id, message=message, kind=type(error).__name__)

    def _prompt(self, fields: Mapping[str, Any], media: _Media) -> dict[str, Any]:
        prompt = {name: fields[name] for name in PROMPT_KEYS if fields.get(name) is not None}
        for name in MEDIA_KEYS:
            if isinstance(prompt.get(name), Mapping):
                prompt[name] = media.of_kinds(prompt[name])
        if "messages" not in prompt:
            if self._system is not None:
                raise RequestError("a system message is for messages, and this line has none")
            return prompt
        prompt["messages"] = with_system(media.of_messages(prompt["messages"]), self._system)
        _check_template(prompt.get("chat_template"))
        own = prompt.get("chat_template_kwargs", {})
        if not isinstance(own, Mapping):
            raise RequestError(f"chat_template_kwargs must be an object, got {_name(own)}")
        if kwargs := {**self._template_kwargs, **own}:
            prompt["chat_template_kwargs"] = kwargs
        return prompt

    def _params(self, own: Any) -> SamplingParams:
        if own is None:
            return self._defaults
        if isinstance(own, SamplingParams):
            own = _explicit(own)
        if not isinstance(own, Mapping) or not all(isinstance(name, str) for name in own):
            raise RequestError(f"sampling_params must be an object, got {_name(own)}")
        defaults = _explicit(self._defaults)
        if defaults.get("temperature") == 0 and any(name in own for name in DRAWS):
            del defaults["temperature"]  # top_p of a line has an effect only on what is drawn
        return SamplingParams(**{**defaults, **own})


def with_system(messages: Any, system: str | None) -> Any:
    """Returns messages that begin with a system message, unless they have one."""
    if system is None or not isinstance(messages, Sequence):
        return messages
    roles = [each.get("role") for each in messages if isinstance(each, Mapping)]
    if any(role in SYSTEM_ROLES for role in roles):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _explicit(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.model_fields_set}


def _as_fields(values: Any) -> Mapping[str, Any]:
    if isinstance(values, Mapping):
        return values
    raise RequestError(
        f"a line must be a JSON object with one of {', '.join(CONTENT_KEYS)}, got {_name(values)}"
    )


def _id_of(fields: Mapping[str, Any], line: int) -> str | int:
    own = fields.get("id")
    if own is None:
        return line
    if isinstance(own, bool) or not isinstance(own, (str, int)) or own == "":
        raise RequestError(f"id must be a string or an integer, got {_name(own)}")
    return own


def _check_template(template: Any) -> None:
    """Raises RequestError for the name of a file: lines come from others, who may not have it
    read."""
    if template is not None and not (isinstance(template, str) and TEMPLATE_MARK.search(template)):
        raise RequestError(
            "chat_template of a line must be a Jinja template itself, with {{ or {%; name a file "
            "with the option chat_template"
        )


def _check_keys(fields: Mapping[str, Any]) -> None:
    for name in fields:
        if name not in KNOWN_KEYS:
            hint = hint_of_key(str(name), MEDIA_KINDS, KNOWN_KEYS)
            raise RequestError(f"the line has an unknown key {str(name)[:80]!r}; {hint}")


class _Media:
    """Resolves the media of a line; collects them in `found`, and the paths of files in `files`."""

    def __init__(self, folder: str | None, kinds: KindTable, expander: PartExpander) -> None:
        self._folder = folder if folder is None or is_url(folder) else os.path.abspath(folder)
        self._kinds, self._expander = kinds, expander
        self.found: list[Media] = []
        self.files: list[str] = []

    def of_kinds(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Resolves {"image": ..., "video": ...}; unknown kinds are left for the intake to check."""
        return {
            kind: self._resolved(kind, value) if kind in self._kinds.kinds else value
            for kind, value in data.items()
        }

    def of_messages(self, messages: Any) -> Any:
        """Returns the messages with the media of their content resolved."""
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            return messages
        return [
            self._message(message, f"messages[{index}].content")
            for index, message in enumerate(messages)
        ]

    def _message(self, message: Any, path: str) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, (list, tuple)):
            return message
        parts = self._expander.content(content, path)
        return {**message, "content": [self._part(own.part) for own in parts]}

    def _part(self, part: Any) -> Any:
        named = {key: self._file(part[key]) for key in self._expander.files(part) if key in part}
        if named:
            return {**part, **named}
        field = part.get("type") if isinstance(part, Mapping) else None
        kind = self._kinds.of_part(field) if isinstance(field, str) else None
        if kind is None or field not in part:
            return part
        return {**part, field: self._resolved(kind, part[field])}

    def _file(self, value: Any) -> Any:
        """Resolves the name of a file in a part that a plugin opens."""
        if not isinstance(value, str):
            return value
        return self._resolved(self._kinds.of_name(value) or "file", value)

    def _resolved(self, kind: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and not _is_numbers(value):
            # Only a plugin knows what nested values of its kind mean.
            is_flat = kind not in MEDIA_KINDS
            return [
                item if is_flat and isinstance(item, (list, tuple)) else self._resolved(kind, item)
                for item in value
            ]
        if isinstance(value, Mapping):  # the media with its options, {"url": ..., "detail": ...}
            inner = next((name for name in (kind, "url") if name in value), None)
            if inner is not None:
                made = {**value, inner: self._resolved(kind, value[inner])}
                if isinstance(value[inner], str) and isinstance(value.get("pages"), str):
                    self.found[-1] = replace(self.found[-1], pages=value["pages"])
                return made
            if isinstance(value.get("data"), str):  # a part "input_audio"
                self.found.append(Media(kind=kind, name=DATA_URL))
            return value
        if isinstance(value, (str, os.PathLike)):
            value = self._path(os.fspath(value))
        self.found.append(Media(kind=kind, name=_media_name(value)))
        return value

    def _path(self, name: Any) -> Any:
        if not isinstance(name, str):
            return name
        if is_url(name):
            self.files += file_paths(name)
            return name
        path = os.path.join(self._folder or "", name)  # an absolute name stays as it is
        self.files += [] if is_url(path) else [path]
        return path


def _named(found: Sequence[Media], names: Sequence[str | None]) -> tuple[Media, ...]:
    """Returns the media with the names that are given."""
    given = (*names, *[None] * (len(found) - len(names)))
    pairs = zip(found, given, strict=True)
    return tuple(own if name is None else replace(own, name=name) for own, name in pairs)


def _is_numbers(values: Sequence[Any]) -> bool:
    """Returns whether a list is one item by itself, such as the samples of a sound."""
    while isinstance(values, (list, tuple)) and values:
        values = values[0]
    return isinstance(values, (int, float))


def _media_name(value: Any) -> str:
    if not isinstance(value, str):
        return f"({_name(value)})"
    if value[:5].lower() == "data:":
        return DATA_URL
    return value if is_url(value) else os.path.abspath(value)


def _question(prompt: Mapping[str, Any]) -> str | None:
    """Returns the start of the prompt, or of the last message that has text."""
    text = prompt.get("prompt")
    messages = prompt.get("messages")
    if isinstance(messages, list):
        text = next(filter(None, map(_text_of, reversed(messages))), None)
    if not isinstance(text, str):
        return None
    return text if len(text) <= MAX_QUESTION else text[: MAX_QUESTION - 1] + "…"


def _text_of(message: Any) -> str:
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = (part.get("text") for part in parts if isinstance(part, Mapping))
    return " ".join(text for text in texts if isinstance(text, str))


def _name(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__
