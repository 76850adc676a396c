"""Closing: the base of what is closed at the end of a `with` block. closed_on_error: closes what a
failed start leaves open."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Self


@contextmanager
def closed_on_error() -> Iterator[ExitStack]:
    """Calls what the block has registered only where the block raises: what is opened in several
    steps is then closed at once, and not when the last traceback that refers to it is gone."""
    with ExitStack() as opened:
        yield opened
        opened.pop_all()


class Closing(ABC):
    """Has a `close` method, which the end of a `with` block calls."""

    @abstractmethod
    def close(self) -> None:
        """Frees what the object holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
