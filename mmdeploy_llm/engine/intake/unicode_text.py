"""Refuses text that is not Unicode: Python's strings may hold lone surrogates, halves of UTF-16
characters, which neither tokenizers nor UTF-8 know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.values.prompt import ChatMessage, TextPart

MAX_SHOWN = 100  # characters of a name in a message


def check_unicode(value: Any, location: str) -> None:
    """Raises RequestError for a lone surrogate in a text, or in any text of nested lists and dicts,
    their keys included. location: names the value in the message."""
    todo = [(location, value)]
    while todo:
        name, found = todo.pop()
        if isinstance(found, str):
            _check(found, name)
        else:
            todo.extend(_inner(name, found))


def _inner(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    name = name[:MAX_SHOWN]
    if isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(key, str):
                _check(key, f"a key of {name}")
            yield f"{name}[{str(key)[:MAX_SHOWN]!r}]", item
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield f"{name}[{index}]", item


def _check(text: str, name: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise RequestError(
            f"{name} is not Unicode text: character {error.start} is U+{code:04X}, a lone "
            "surrogate; remove it, or replace it with text.encode(errors='replace').decode()"
        ) from None


def check_chat(
    messages: Sequence[ChatMessage], variables: Mapping[str, Any], template: str
) -> None:
    """Raises RequestError for text of a chat that is not Unicode, wherever the template uses it.
    Names of media files are not text: they were taken out before."""
    others = {name: value for name, value in variables.items() if name != "tools"}
    for index, message in enumerate(messages):
        name = f"messages[{index}]"
        check_unicode(message.fields, name)
        is_text = isinstance(message.content, str)
        for place, part in enumerate(message.parts):
            if isinstance(part, TextPart):
                own = "" if is_text else f"[{place}]['text']"
                check_unicode(part.text, f"{name}['content']{own}")
    check_unicode(variables["tools"], "tools")
    check_unicode(others, "chat_template_kwargs")
    check_unicode(template, "chat_template")
