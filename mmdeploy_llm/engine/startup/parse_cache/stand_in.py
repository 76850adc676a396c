"""StandIn: takes the place of an object of transformers until somebody needs that object."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

LIBRARY = "transformers"


class Source:
    """Loads the real object, once, for all that stand in for it and its parts. Any thread."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load, self._lock = load, threading.Lock()
        self._found: Any = None
        self.is_loaded = False

    def real(self) -> Any:
        """Returns the real object."""
        with self._lock:
            if not self.is_loaded:
                self._found = self._load()
                self.is_loaded = True
        return self._found


class Own:
    """Knows what is kept of an object, and where the real one is."""

    source: Source

    def real(self) -> Any:
        """Returns the real object."""
        raise NotImplementedError

    def kept(self, owner: Any, name: str) -> Any:
        """Returns the kept value of an attribute, NotImplemented where there is none; may raise
        AttributeError. owner: the stand-in."""
        raise NotImplementedError


class StandIn:
    """Answers what is kept. Everything else, every change included, happens to the real object,
    which answers all from then on. Where transformers has been imported, which is necessary to ask
    for its classes, an isinstance check sees the class of the real object."""

    __slots__ = ("_own",)

    def __init__(self, own: Own) -> None:
        object.__setattr__(self, "_own", own)

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "_own")
        if name == "__class__":
            return type(own.real()) if LIBRARY in sys.modules else type(self)
        if name in OF_OBJECT:
            return object.__getattribute__(self, name)
        if not own.source.is_loaded:
            found = own.kept(self, name)
            if found is not NotImplemented:
                return found
        return getattr(own.real(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(real(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(real(self), name)

    def __copy__(self) -> Any:
        return copy.copy(real(self))

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(real(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return real(self).__reduce_ex__(protocol)

    def __eq__(self, other: object) -> bool:
        return bool(real(self) == (real(other) if issubclass(type(other), StandIn) else other))

    def __hash__(self) -> int:
        return hash(real(self))

    def __iter__(self) -> Iterator[Any]:
        return iter(real(self))

    def __len__(self) -> int:
        return len(real(self))

    def __bool__(self) -> bool:
        return True

    def __dir__(self) -> list[str]:
        return dir(real(self))

    def __repr__(self) -> str:
        return repr(real(self))


OF_OBJECT = frozenset({"__copy__", "__deepcopy__", "__reduce_ex__", "__eq__", "__hash__"})


def own_of(stand_in: StandIn) -> Any:
    """Returns the `Own` of a stand-in."""
    return object.__getattribute__(stand_in, "_own")


def real(stand_in: Any) -> Any:
    """Returns the real object of a stand-in, and any other object as it is."""
    return own_of(stand_in).real() if issubclass(type(stand_in), StandIn) else stand_in
