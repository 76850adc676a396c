"""Belonging: an object that belongs to the process that made it, such as an LLM."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn, Self

from mmdeploy_llm.system.processes import Home


class Belonging(ABC):
    """Base of an object with a `close` method that works only in the process that made it. At the
    end of a `with` block it is closed, unless the block ends in a forked process."""

    def __init__(self) -> None:
        self._home = Home()

    @abstractmethod
    def close(self) -> None:
        """Frees what the object holds."""

    def _lent(self) -> AbstractContextManager[Self]:
        """Returns a context with this object that does not close it. Raises EngineError in a forked
        process."""
        self._home.check()
        return nullcontext(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._home.is_here:
            self.close()

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(
            f"this {name} cannot be sent to another process, whose weights and threads it would "
            f"need; make an {name} there, in a function or the initializer of the pool"
        )
