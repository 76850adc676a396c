"""Closing: the base of what is closed at the end of a `with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Has a `close` method, which the end of a `with` block calls."""

    @abstractmethod
    def close(self) -> None:
        """Frees what the object holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
