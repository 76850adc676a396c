"""Old names of the fields of a class, which are taken for a while with a warning.

    # Old name -> the new one, and the version of the package that removes the old one.
    @with_old_names({"turned_dim": ("rotary_dim", "0.3")})
    @dataclass(frozen=True, slots=True, kw_only=True)
    class RotaryConfig: ...

The next rename of the class is one row more.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

OLD_NAMES = "__old_names__"  # the class attribute that has the table
Class = TypeVar("Class", bound=type[Any])


def with_old_names(table: Mapping[str, tuple[str, str]]) -> Callable[[Class], Class]:
    """Returns a decorator of a class whose constructor takes, and whose instances have, the old
    names of its fields; each use raises a DeprecationWarning. Of both names the old one counts, as
    in dataclasses.replace(config, old=...)."""

    def decorated(cls: Class) -> Class:
        build = cls.__init__

        @functools.wraps(build)
        def taking_old_names(self: Any, *values: Any, **named: Any) -> None:
            for old in table.keys() & named.keys():
                _warn(cls, old, table)
                named[table[old][0]] = named.pop(old)
            build(self, *values, **named)

        cls.__init__ = taking_old_names
        for old in table:
            setattr(cls, old, _reader(old, table))
        setattr(cls, OLD_NAMES, table)
        return cls

    return decorated


def _reader(old: str, table: Mapping[str, tuple[str, str]]) -> property:
    def read(self: Any) -> Any:
        _warn(type(self), old, table)
        return getattr(self, table[old][0])

    return property(read, doc=f"The old name of `{table[old][0]}`.")


def _warn(cls: type, old: str, table: Mapping[str, tuple[str, str]]) -> None:
    new, until = table[old]
    text = f"{cls.__name__}.{old} is now called {new}; mmdeploy-llm {until} removes the old name"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
