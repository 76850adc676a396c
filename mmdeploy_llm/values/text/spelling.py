"""Finds the name that a misspelled one means, and says where an attribute is that is elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

Cls = TypeVar("Cls", bound=type)

MIN_STEM = 3  # letters of an abbreviation, such as "mem"


def meant(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that `name` misspells, shortens or lacks a word of; None where no one
    can be told: a name that only looks alike would mislead."""
    names = list(known)
    same = [own for own in names if _letters(own) == _letters(name)]
    words = name.lower().replace("-", "_").split("_")
    near = same or [own for own in names if _is_misspelled(words, own.split("_"))]
    near = near or [own for own in names if _lacks_words(words, own.split("_"))]
    return near[0] if len(near) == 1 else None


def _letters(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _is_misspelled(words: list[str], own: list[str]) -> bool:
    if len(words) != len(own):
        return False
    has_several = len(words) > 1
    return all(_is_like(a, b, has_several) for a, b in zip(words, own, strict=True))


def _lacks_words(words: list[str], own: list[str]) -> bool:
    """Whether several words stand in `own` in the same order, with others around them."""
    rest = iter(own)
    return len(words) > 1 and all(any(_may_be(word, each) for each in rest) for word in words)


def _may_be(word: str, own: str) -> bool:
    """Whether a word is another one, or short for it."""
    return _is_like(word, own, False) or (len(word) >= MIN_STEM and own.startswith(word))


def _is_like(word: str, own: str, may_be_short: bool) -> bool:
    """Whether a word is the other one with a wrong, missing, further or swapped letter, two in a
    long word; or, where it may be short, one begins the other."""
    longest = max(len(word), len(own))
    limit = 0 if longest < MIN_STEM else 1 if longest < 8 else 2
    stem, whole = sorted((word, own), key=len)
    if may_be_short and len(stem) >= MIN_STEM and whole.startswith(stem):
        return True
    return word == own or _distance(word, own) <= limit


def _distance(a: str, b: str) -> int:
    """Returns how many letters differ, are missing or further, or are swapped with the next."""
    rows = [list(range(len(b) + 1))]
    for i, letter in enumerate(a, 1):
        row = [i]
        for j, other in enumerate(b, 1):
            cost = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                cost = min(cost, rows[-2][j - 2] + 1)
            row.append(cost)
        rows.append(row)
    return rows[-1][-1]


def naming_elsewhere(places: Mapping[str, str]) -> Callable[[Cls], Cls]:
    """Decorates a class whose error of an attribute that it lacks says what to write instead.
    places: that attribute -> what to write. Type checkers do not see it."""

    def missing(self: Any, name: str) -> Any:
        fault = f"{type(self).__name__!r} object has no attribute {name!r}"
        if name in places:
            raise AttributeError(f"{fault}; use {places[name]}")
        raise AttributeError(fault, name=name, obj=self)

    def decorated(cls: Cls) -> Cls:
        cls.__getattr__ = missing  # type: ignore[attr-defined]
        return cls

    return decorated
