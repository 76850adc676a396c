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
from mmdeploy_llm.engine.intake.prompts import (
    CONTENT_KEYS,
    PROMPT_KEYS,
    PromptReader,
    hint_of_key,
    with_changed_media,
)
from mmdeploy_llm.errors import MMDeployLLMError, RequestError
from mmdeploy_llm.hooks import KindTable
from mmdeploy_llm.media.loading.forms import is_one
from mmdeploy_llm.messages import MEDIA_KINDS, MediaItem
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.prompt import ChatMessage, PromptParts

KNOWN_KEYS = ("id", *PROMPT_KEYS, "sampling_params", "ask")
_KNOWN = frozenset(KNOWN_KEYS)
TEMPLATE_MARK = re.compile(r"\{[{%]")
SYSTEM_ROLES = ("system", "developer")
# They choose how tokens are drawn.
DRAWS = ("do_sample", "temperature", "top_p", "top_k", "min_p", "n")
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
        self._folder = folder
        self._prompts = PromptReader.of_kinds(kinds)
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
            if not fields.keys() <= _KNOWN:
                raise _unknown_key(fields)
            base = self._folder if folder is None else folder
            media = _Media(base)
            prompt = self._prompt(fields, media)
            asked = fields.get("ask")
            questions = () if asked is None else questions_about(prompt, read_asks(asked))
            prompt = questions[0].prompt if questions else prompt
            carried = {"columns": columns} if columns else {}
            return Item(
                line=line,
                id=item_id,
                prompt=prompt,
                params=self._params(fields.get("sampling_params")),
                media=_named(media.found, names) if names else tuple(media.found),
                question=_question(prompt),
                digest=digest_of({**fields, **carried}, *map(file_state, media.files)),
                columns=columns or {},
                questions=questions,
                endpoint=endpoint,
            )
        except (MMDeployLLMError, RecursionError) as error:
            message = str(error) or "the line is nested too deeply"
            return BadItem(line=line, id=item_id, message=message, kind=type(error).__name__)

    def _prompt(self, fields: Mapping[str, Any], media: _Media) -> PromptParts:
        given = {name: fields[name] for name in PROMPT_KEYS if fields.get(name) is not None}
        prompt = with_changed_media(self._prompts.read(given), media.resolved)
        if prompt.messages is None:
            if self._system is not None:
                raise RequestError("a system message is for messages, and this line has none")
            return prompt
        _check_template(prompt.template)
        own = {} if prompt.template_kwargs is None else prompt.template_kwargs
        if not isinstance(own, Mapping):
            raise RequestError(f"chat_template_kwargs must be an object, got {_name(own)}")
        kwargs = {**self._template_kwargs, **own}
        messages = with_system(prompt.messages, self._system)
        if messages is prompt.messages and kwargs == own:
            return prompt
        return replace(prompt, messages=messages, template_kwargs=kwargs or None)

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


def with_system(messages: tuple[ChatMessage, ...], system: str | None) -> tuple[ChatMessage, ...]:
    """Returns messages that begin with a system message, unless they have one."""
    if system is None or any(message.role in SYSTEM_ROLES for message in messages):
        return messages
    return (ChatMessage(fields={"role": "system"}, content=system), *messages)


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


def _unknown_key(fields: Mapping[str, Any]) -> RequestError:
    name = str(next(name for name in fields if name not in _KNOWN))
    hint = hint_of_key(name, MEDIA_KINDS, KNOWN_KEYS)
    return RequestError(f"the line has an unknown key {name[:80]!r}; {hint}")


class _Media:
    """Resolves the media of a line; collects them in `found`, and the paths of files in `files`."""

    def __init__(self, folder: str | None) -> None:
        self._folder = folder if folder is None or is_url(folder) else os.path.abspath(folder)
        self.found: list[Media] = []
        self.files: list[str] = []

    def resolved(self, item: MediaItem) -> Any:
        """Returns the source of an item, a relative path made absolute."""
        value, pages = item.source, item.options.get("pages")
        if isinstance(value, (list, tuple)) and not is_one(value):  # a plugin knows what is in it
            return value
        is_paged = isinstance(value, str) and isinstance(pages, str)
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        name = f"({_name(value)})"
        if isinstance(value, str):
            name, value = self._located(value)
        self.found.append(Media(kind=item.kind, name=name, pages=pages if is_paged else None))
        return value

    def _located(self, value: str) -> tuple[str, str]:
        """Returns the name of a medium for records, and where it is."""
        if is_url(value):
            self.files += file_paths(value)
        else:
            value = os.path.join(self._folder or "", value)  # an absolute name stays as it is
            if not is_url(value):
                self.files.append(value)
                return os.path.abspath(value), value
        return DATA_URL if value[:5].lower() == "data:" else value, value


def _named(found: Sequence[Media], names: Sequence[str | None]) -> tuple[Media, ...]:
    """Returns the media with the names that are given."""
    given = (*names, *[None] * (len(found) - len(names)))
    pairs = zip(found, given, strict=True)
    return tuple(own if name is None else replace(own, name=name) for own, name in pairs)


def _question(prompt: PromptParts) -> str | None:
    """Returns the start of the prompt, or of the last message that has text."""
    texts = (message.text for message in reversed(prompt.messages or ()))
    text = prompt.text if prompt.messages is None else next(filter(None, texts), None)
    if text is None:
        return None
    return text if len(text) <= MAX_QUESTION else text[: MAX_QUESTION - 1] + "…"


def _name(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__
