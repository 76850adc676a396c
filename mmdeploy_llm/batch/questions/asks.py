"""Asks: what is asked about each item of a batch: questions, by the names that their answers get,
or a vector.

{"caption": "Describe.", "tags": "List tags."}  -->  "answers": {"caption": ..., "tags": ...}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

from mmdeploy_llm.data.records.item import Item, Question
from mmdeploy_llm.errors import ConfigError, RequestError
from mmdeploy_llm.values.pooling_request import PoolingRequest
from mmdeploy_llm.values.prompt import ChatMessage, PromptParts, TextPart

MAX_ASKS = 64
MAX_SHOWN = 40  # characters of a wrong value
NAME = re.compile(r"\w[\w.-]{0,63}")
FORM = '{"caption": "Describe.", "tags": "List tags."}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Asks:
    """Holds the questions about every item, where it is more than one.

    questions: texts by name, with columns in them as in `prompt`; {}: only one question is asked.
    wanted: a vector of each item instead of answers; the question is then the text that is embedded
        with its media.
    of_model: returns what a model is asked about media where there is no question; None: to
        describe them, as without `of_model`.
    """

    questions: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    wanted: PoolingRequest | None = None
    of_model: Callable[[], str | None] | None = None

    @classmethod
    def given(cls, ask: Any = None) -> Asks:
        """Reads questions as a program gives them. Raises ConfigError."""
        try:
            return cls() if ask is None else cls(questions=MappingProxyType(read_asks(ask)))
        except RequestError as error:
            raise ConfigError(str(error)) from None

    def check(self, prompt: str | None) -> None:
        """Raises ConfigError when there is a question without a name, too."""
        if prompt is not None and self.questions:
            raise ConfigError(
                "--prompt asks one question and --ask several by name (in Python prompt and ask); "
                "give one of them: --ask NAME=TEXT"
            )

    def values(self) -> dict[str, Any]:
        """Returns the questions for a configuration, or how vectors are made."""
        if self.wanted is not None:
            return vector_values(self.wanted)
        return {f"ask.{name}": text for name, text in self.questions.items()}

    @property
    def done(self) -> str:
        """The verb for an item that is done."""
        return "answered" if self.wanted is None else "embedded"

    def described(self, kind: str) -> str:
        """Returns what is asked about media of a kind where there is no question."""
        if self.wanted is not None:
            return ""
        own = None if self.of_model is None else self.of_model()
        return f"Describe the {kind}." if own is None else own

    def shaped(self, item: Item, *, is_ours: bool) -> Item:
        """Returns an item as it is asked. is_ours: whether the conversation in it was made of its
        media and the question; a vector is made of these. Raises RequestError for a line with
        several questions, where a vector is wanted."""
        if self.wanted is None:
            return item
        if item.questions:
            raise RequestError("the line has several questions (ask), and a vector answers none")
        prompt = plain_prompt(item.prompt) if is_ours else item.prompt
        return replace(item, prompt=prompt, wanted=self.wanted)


NO_ASKS = Asks()


def vector_values(wanted: PoolingRequest) -> dict[str, Any]:
    """Returns for a configuration how vectors are made, without what the model's folder says."""
    plain = asdict(PoolingRequest())
    given = {n: value for n, value in asdict(wanted).items() if value and value != plain[n]}
    given.pop("is_document", None)  # every vector of a corpus is one
    if wanted.normalize is False:
        given["normalize"] = False
    return {"vectors.what": "vector", **{f"vectors.{name}": own for name, own in given.items()}}


def plain_prompt(prompt: PromptParts) -> PromptParts:
    """Returns the media and the text of a conversation with one message as a prompt without one."""
    assert prompt.messages is not None
    (message,) = prompt.messages
    texts = [part.text for part in message.parts if isinstance(part, TextPart)]
    text, media = "\n".join(texts) if texts else None, tuple(prompt.items)
    return replace(prompt, messages=None, template_kwargs=None, text=text, media=media)


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


def questions_about(prompt: PromptParts, texts: Mapping[str, str]) -> tuple[Question, ...]:
    """Returns a question for each text, which is the last part of the last message. Raises
    RequestError for a prompt to which none can be added."""
    if prompt.messages is None or prompt.messages[-1].role != "user":
        raise RequestError(
            "ask adds its questions to 'messages' whose last one is the user's, with the media in "
            'its content: [{"role": "user", "content": [{"type": "image", "image": ...}]}]'
        )
    *before, last = prompt.messages
    return tuple(
        Question(name=name, prompt=replace(prompt, messages=(*before, _with_text(last, text))))
        for name, text in texts.items()
    )


def _with_text(message: ChatMessage, text: str) -> ChatMessage:
    """Returns the message with a text at its end."""
    return replace(message, content=(*message.parts, *([TextPart(text=text)] if text else ())))


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, (str, int, float, type(None))) else ""
    return text[:MAX_SHOWN] if text else type(value).__name__
