"""Asks: the questions about each item of a batch, by the names that their answers get, and the
system message.

    {"caption": "Describe.", "tags": "List tags."}  -->  "answers": {"caption": ..., "tags": ...}
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mmdeploy_llm.errors import ConfigError, RequestError
from mmdeploy_llm.records.item import Question

MAX_ASKS = 64
MAX_SHOWN = 40  # characters of a wrong value
MAX_FILE = 2**20  # bytes of a question
NAME = re.compile(r"\w[\w.-]{0,63}")
FORM = '{"caption": "Describe.", "tags": "List tags."}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Asks:
    """Holds what is asked about every item besides `prompt`.

    questions: texts by name, with columns in them as in `prompt`; {}: only one question is asked.
    system: the system message of conversations that have none. None: they have none.
    """

    questions: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    system: str | None = None

    @classmethod
    def given(cls, ask: Any = None, system: Any = None) -> Asks:
        """Reads questions as a program gives them: a dict, or a list of texts NAME=QUESTION. A
        question or system message @FILE is read from a file, and @@ begins one with an @.

        Raises ConfigError.
        """
        if ask is not None and not isinstance(ask, Mapping):
            ask = _pairs(ask)
        try:
            questions = read_asks(ask) if ask is not None else {}
        except RequestError as error:
            raise ConfigError(str(error)) from None
        texts = {name: text_or_file(text, f"ask {name!r}") for name, text in questions.items()}
        if system is not None and not (isinstance(system, str) and system.strip()):
            raise ConfigError(f"system must be a text, got {_shown(system)}")
        return cls(
            questions=MappingProxyType(texts),
            system=None if system is None else text_or_file(system, "system"),
        )

    def check(self, prompt: str | None) -> None:
        """Raises ConfigError when there is a question without a name, too."""
        if prompt is not None and self.questions:
            raise ConfigError(
                "--prompt asks one question and --ask several by name (in Python prompt and ask); "
                "give one of them: --ask NAME=QUESTION"
            )

    def values(self) -> dict[str, Any]:
        """Returns what is set, by name, for a configuration."""
        found: dict[str, Any] = {f"ask.{name}": text for name, text in self.questions.items()}
        return found if self.system is None else {**found, "system": self.system}


NO_ASKS = Asks()


def read_asks(given: Any) -> dict[str, str]:
    """Returns the questions of an `ask`. Raises RequestError for anything but texts by name."""
    if not isinstance(given, Mapping) or not given:
        raise RequestError(f"ask must be an object of questions by name, {FORM}")
    if len(given) > MAX_ASKS:
        raise RequestError(f"ask has {len(given)} questions, and {MAX_ASKS} are allowed")
    for name, text in given.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise RequestError(
                f"ask has the name {_shown(name)}; a name begins with a letter or digit, and has "
                "letters, digits and ._- after it, at most 64 in all"
            )
        if not isinstance(text, str) or not text.strip():
            raise RequestError(f"ask {name!r} must be a question, got {_shown(text)}")
    return dict(given)


def questions_about(prompt: Mapping[str, Any], texts: Mapping[str, str]) -> tuple[Question, ...]:
    """Returns a question for each text, which is the last part of the last message. Raises
    RequestError for a prompt to which none can be added."""
    messages = prompt.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, Mapping) or last.get("role") != "user":
        raise RequestError(
            "ask adds its questions to 'messages' whose last one is the user's, with the media in "
            'its content: [{"role": "user", "content": [{"type": "image", "image": ...}]}]'
        )
    content = last.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}] if content else []
    if content is not None and not isinstance(content, (list, tuple)):
        raise RequestError(f"'content' must be a text or a list, got {type(content).__name__}")
    before, parts = list(messages or ())[:-1], list(content or ())
    return tuple(
        Question(
            name=name,
            prompt={
                **prompt,
                "messages": [
                    *before,
                    {**last, "content": [*parts, {"type": "text", "text": text}]},
                ],
            },
        )
        for name, text in texts.items()
    )


def with_system(prompt: Mapping[str, Any], system: str | None) -> dict[str, Any]:
    """Returns a prompt that begins with the system message, unless it has one of its own. Raises
    RequestError for one that is no conversation."""
    messages = prompt.get("messages")
    if system is None:
        return dict(prompt)
    if not isinstance(messages, list):
        raise RequestError(
            "a system message needs 'messages': the line has a prompt that is used as it is"
        )
    first = messages[0] if messages else None
    if isinstance(first, Mapping) and first.get("role") in ("system", "developer"):
        return dict(prompt)
    return {**prompt, "messages": [{"role": "system", "content": system}, *messages]}


def text_or_file(text: str, what: str) -> str:
    """Returns a text, or the content of the file that @FILE names. Raises ConfigError for a file
    that cannot be read. what: names the text in messages."""
    if text.startswith("@@"):
        return text[1:]
    if not text.startswith("@"):
        return text
    path = Path(text[1:])
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is no regular file")
        with path.open("rb") as file:
            data = file.read(MAX_FILE + 1)
        found = data.decode("utf-8-sig").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the file {str(path)!r} of {what} cannot be read: {error}; a text that begins with @ "
            "is written with @@"
        ) from None
    if not found or len(data) > MAX_FILE:
        size = "is empty" if not found else f"has more than {MAX_FILE >> 10} KiB"
        raise ConfigError(f"the file {str(path)!r} of {what} {size}")
    return found


def _pairs(given: Any) -> dict[str, str]:
    """Returns the questions of texts NAME=QUESTION. Raises ConfigError for a name twice."""
    if isinstance(given, str) or not isinstance(given, (Sequence, Iterable)):
        raise ConfigError(f"ask must be a dict of questions by name, {FORM}, got {_shown(given)}")
    found: dict[str, str] = {}
    for text in given:
        name, separator, question = text.partition("=") if isinstance(text, str) else ("", "", "")
        if not separator:
            raise ConfigError(f'--ask {_shown(text)} must be NAME=QUESTION, such as tags="List."')
        if name in found:
            raise ConfigError(f"--ask {name!r} is given twice; names must differ")
        found[name] = question
    return found


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, (str, int, float, type(None))) else ""
    return text[:MAX_SHOWN] if text else type(value).__name__
