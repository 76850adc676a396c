"""Closes what a failed start leaves open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def closed_on_error() -> Iterator[ExitStack]:
    """Calls what the block has registered only where the block raises: what is opened in several
    steps is then closed at once, and not when the last traceback that refers to it is gone."""
    with ExitStack() as opened:
        yield opened
        opened.pop_all()
