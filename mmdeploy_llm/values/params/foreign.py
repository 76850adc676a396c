"""Options of other engines (foreign_options.toml): what to write here instead of one that asks for
something. One whose value means "off" is left out, one of a server with a warning."""

from __future__ import annotations

import sys
import tomllib
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

PACKAGE = __name__.partition(".")[0]
ROWS = Path(__file__).with_name("foreign_options.toml")
OF_LORA = ("max_cpu_loras", "max_lora_rank", "max_loras")  # nothing where enable_lora is off
IGNORED: Mapping[str, str] = MappingProxyType(
    {
        "serving": "without a meaning offline",
        "tuning": "as this engine decides it by itself",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignOption:
    """An option of another engine.

    say: what to write here; "" for one that is ignored. off: values beside None, False and what is
    empty that ask for what happens here anyway. false_asks: False is not among them. ignored: a
    name of IGNORED, or "".
    """

    say: str = ""
    off: Collection[Any] = ()
    false_asks: bool = False
    ignored: str = ""

    def is_off(self, value: Any) -> bool:
        """Whether a value asks for nothing but what happens here without it."""
        if value is None or (isinstance(value, (str, Mapping, list, tuple)) and not value):
            return True
        if value is False:
            return not self.false_asks
        return any(type(own) is type(value) and own == value for own in self.off)


def foreign_options(owner: str) -> Mapping[str, ForeignOption]:
    """Returns the options of other engines by name, none for an unknown owner. owner: the class
    that has such options here, as EngineConfig, or "calls" for keywords of calls."""
    return _tables().get(owner, {})


@cache
def _tables() -> Mapping[str, Mapping[str, ForeignOption]]:
    tables = tomllib.loads(ROWS.read_text("utf-8"))
    return MappingProxyType({owner: _options(rows) for owner, rows in tables.items()})


def _options(rows: Mapping[str, Any]) -> Mapping[str, ForeignOption]:
    made: dict[str, ForeignOption] = {}
    for name, row in rows.items():
        row = {"say": row} if isinstance(row, str) else row
        if like := row.pop("like", None):
            row["say"] = made[like].say
        made[name] = ForeignOption(**row)
    return MappingProxyType(made)


def advice(owner: str) -> Mapping[str, str]:
    """Returns what to write here, by the name of an option; without those that are ignored."""
    return {name: row.say for name, row in foreign_options(owner).items() if row.say}


def that_ask(kind: str, known: Collection[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that ask for something. kind: the class of options, whose names are
    `known`. Warns of options that are ignored."""
    return {**given} if given.keys() <= set(known) else _without_off(kind, known, given)


def _without_off(kind: str, known: Collection[str], given: Mapping[str, Any]) -> dict[str, Any]:
    rows = foreign_options(kind)
    foreign = {name: rows[name] for name in given if name not in known and name in rows}
    off = {name for name, row in foreign.items() if _is_off(name, row, given)}
    ignored = {name: row.ignored for name, row in foreign.items() if row.ignored}
    for why in IGNORED:
        if names := sorted(name for name, own in ignored.items() if own == why and name not in off):
            _warn(f"ignored, {IGNORED[why]}: {', '.join(names)}")
    return {name: value for name, value in given.items() if name not in {*off, *ignored}}


def _is_off(name: str, row: ForeignOption, given: Mapping[str, Any]) -> bool:
    value = given[name]
    if name in OF_LORA and not given.get("enable_lora", True):
        return True
    if name == "best_of" and type(value) is int:
        return value == (given.get("n") or 1)
    return row.is_off(value)


def _warn(text: str) -> None:
    """Warns at the line outside of this package that has called it."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UserWarning, stacklevel=level)
