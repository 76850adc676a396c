"""Pauses the collection of garbage while an engine is loaded: it would go through all modules of
torch and transformers several times, and free nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Collects no garbage in the block, if the program collects any. What was made in it counts as
    old afterwards: only a full collection looks at it."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # else the program's own objects would be unfrozen
            gc.freeze()
            gc.unfreeze()
        gc.enable()
