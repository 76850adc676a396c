"""TextRules: what an answer must not begin with, and how long it may be."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from mmdeploy_llm.errors import ConfigError

from .validated import Check

MAX_SHOWN = 60  # characters of an answer in a message
_QUOTES = str.maketrans("\u2018\u2019\u201c\u201d", "''\"\"")
_MARKS = re.compile(r"^[\W_]+")  # quotation marks, asterisks and others before the first word


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """Rules for the texts of answers; one that breaks them is asked again. avoid: openings, such as
    "This image", in any case. max_words: words between white space. max_chars: characters."""

    avoid: tuple[str, ...] = ()
    max_words: int | None = None
    max_chars: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_words", "max_chars"):
            most = getattr(self, name)
            if most is not None and most < 1:
                raise ConfigError(f"{name} must be at least 1, got {most}")
        if not all(isinstance(words, str) and words.strip() for words in self.avoid):
            raise ConfigError(f"avoid must be openings of answers, got {list(self.avoid)!r}")

    @classmethod
    def given(
        cls, avoid: str | Collection[str] | None, max_words: int | None, max_chars: int | None
    ) -> TextRules:
        """Returns the rules of options, in which `avoid` may be one text. Raises ConfigError."""
        openings = (avoid,) if isinstance(avoid, str) else tuple(avoid or ())
        return cls(avoid=openings, max_words=max_words, max_chars=max_chars)

    def values(self) -> dict[str, Any]:
        """Returns what decides answers, for the configuration of an output."""
        values = {name: getattr(self, name) for name in ("max_words", "max_chars")}
        values["avoid"] = list(self.avoid) or None
        return {name: value for name, value in values.items() if value is not None}

    def checks(self) -> list[Check]:
        """Returns a check for each rule."""
        checks: list[Check] = [Avoid(self.avoid)] if self.avoid else []
        if self.max_words is not None:
            checks.append(Limit("max_words", self.max_words, "words"))
        if self.max_chars is not None:
            checks.append(Limit("max_chars", self.max_chars, "characters"))
        return checks


class Avoid:
    """Finds answers that begin with one of several openings: whatever their case, white space,
    quotation marks and accents' encoding; an opening ends at the end of a word."""

    name = "avoid"
    needs_end = False

    def __init__(self, openings: Collection[str]) -> None:
        self._openings = {plain(opening): opening for opening in openings}

    def violation(self, text: str) -> str | None:
        """Returns which opening a text begins with."""
        whole = plain(text)
        for begin in (whole, _MARKS.sub("", whole)):
            for opening, shown in self._openings.items():
                if begin.startswith(opening) and not _goes_on(begin, len(opening)):
                    return f"it begins with {shown!r}"
        return None


class Limit:
    """Finds answers that are too long. unit: "words" or "characters"."""

    needs_end = False

    def __init__(self, name: str, most: int, unit: str) -> None:
        self.name, self._most, self._unit = name, most, unit

    def violation(self, text: str) -> str | None:
        """Returns how long a text is if it is too long."""
        found = len(text.split()) if self._unit == "words" else len(text)
        if found <= self._most:
            return None
        return f"it has {found} {self._unit}, at most {self._most} are allowed"


def plain(text: str) -> str:
    """Returns a text without what does not count when openings are compared."""
    normal = unicodedata.normalize("NFC", text).translate(_QUOTES).casefold()
    return " ".join(normal.split())


def _goes_on(text: str, end: int) -> bool:
    """Whether a word goes on at `end`. Scripts without cases, such as Chinese, are written without
    spaces between words: there every place ends one."""
    before, after = text[end - 1 : end], text[end : end + 1]
    return _is_inner(before) and _is_inner(after)


def _is_inner(char: str) -> bool:
    return char.isdigit() or char.lower() != char.upper()
