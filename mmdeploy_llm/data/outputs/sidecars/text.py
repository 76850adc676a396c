"""SidecarText: the text of a sidecar, built from a record and from what is there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.records.template import Template
from mmdeploy_llm.data.records.unicode_text import without_surrogates
from mmdeploy_llm.errors import ConfigError

OWN_NAMES = ("text", "trigger", "file", "stem", "folder")  # what the template of any file may have
ENDS = (",", ".", ";", ":", "!", "?", "。", "，", "、", "！", "？", "；", "：")
_LINE_ENDS = re.compile(r"\r\n|[\r\n\v\f\x1c-\x1e\x85\u2028\u2029]")


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarText:
    """Builds texts: the trigger words, `prefix`, the template, `suffix`. Raises ConfigError for a
    template that is none.

    template: None is "{text}". trigger: words that come first, with commas; not again where the
    template has {trigger}.
    """

    template: str | None = None
    prefix: str = ""
    suffix: str = ""
    trigger: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        Template(self.template or "{text}")

    def check(self, answers: Iterable[str]) -> None:
        """Raises ConfigError for a name that is neither a file's own nor one of the answers."""
        known = dict.fromkeys((*OWN_NAMES, *answers))
        for name in Template(self.template or "{text}").names:
            if name not in known:
                raise ConfigError(
                    f"no value fills {{{name[:40]}}} in --sidecar-template; files have "
                    f"{', '.join(f'{{{own}}}' for own in known)}"
                )

    def of(self, record: Record, path: str) -> Built:
        """Returns the text of a record about the file at an absolute path, in one line: trainers
        read the first line only. Raises RequestError when a name in the template has no value."""
        template = Template(self.template or "{text}")
        trigger = ", ".join(self._words)
        values = {name: _shown(value) for name, value in self._values(record, path).items()}
        text = self.prefix + template.fill({**values, "trigger": trigger}) + self.suffix
        own = in_one_line(text)
        if trigger and "trigger" not in template.names:
            own = f"{trigger}, {own}"
        return Built(text=own, has_several_lines=has_several_lines(text))

    def after(self, known: str, text: str) -> str:
        """Returns a text after the one that is there, in one line which begins with the trigger
        words where the new one does. One that ends with the new text gets it no second time."""
        lines = filter(None, map(in_one_line, _LINE_ENDS.split(known)))
        own, trigger = _joined(*lines), ", ".join(self._words)
        if not trigger or not text.startswith(trigger):
            return own if own.endswith(text) else _joined(own, text)
        text = text.removeprefix(trigger).lstrip(", ")
        if not re.match(rf"{re.escape(trigger)}(?!\w)", own):
            own = _joined(trigger, self._without_words(own))
        return own if own.endswith(text) else _joined(own, text)

    @property
    def _words(self) -> list[str]:
        """The trigger words, without commas around them."""
        return [word for own in self.trigger if (word := in_one_line(own).strip(", "))]

    def _without_words(self, text: str) -> str:
        """Returns a text without the trigger words that it begins with, each up to its comma."""
        own = "|".join(map(re.escape, self._words))
        return re.sub(rf"^(?:(?:{own})\s*(?:,\s*|$))+", "", text)

    def _values(self, record: Record, path: str) -> dict[str, Any]:
        name = os.path.basename(path)
        return {
            **record.columns,
            **(getattr(record, "answers", None) or {}),
            "text": record.text,
            "file": name,
            "stem": os.path.splitext(name)[0],
            "folder": os.path.basename(os.path.dirname(path)),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A text in one line. has_several_lines: whether it had several before."""

    text: str
    has_several_lines: bool


def in_one_line(text: str) -> str:
    """Returns a text without line ends and repeated spaces."""
    return without_surrogates(" ".join(text.split()))


def has_several_lines(text: str) -> bool:
    """Returns whether a text has more than one line with something in it."""
    return _LINE_ENDS.search(text.strip()) is not None


def _joined(first: str = "", *others: str) -> str:
    """Returns texts one after the other, with a comma where one ends without a mark."""
    for text in filter(None, others):
        gap = "" if not first else " " if first.endswith(ENDS) else ", "
        first = f"{first}{gap}{text}"
    return first


def _shown(value: Any) -> Any:
    """Returns a list of texts as tags are written; other values as they are."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return value
