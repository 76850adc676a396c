"""Flag: how the program has an option that is declared for Python. Imports little."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Flag:
    """How the program has an option: metadata of the field, or of the key of a TypedDict, that
    declares it.

    help, metavar: as --help shows it; is_rare: only --help-all does. names: unless they are the
    option's name with hyphens. default: where nothing is given. min, max: of a number. type: of
    the values, unless it is the declared one or a text. is_file: whether it must be a file.
    """

    help: str
    metavar: str | None = None
    is_rare: bool = False
    names: tuple[str, ...] = ()
    default: Any = None
    min: float | None = None
    max: float | None = None
    type: Any = None
    is_file: bool = False
