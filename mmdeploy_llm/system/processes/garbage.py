"""Pauses the collection of garbage while an engine is loaded: it would go through all modules of
torch and transformers several times, and free nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 10_000  # young objects; to collect fewer takes a millisecond


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
        # Few are young where an engine has frozen what it made. To count them would take as long as
        # to look at each; where the program has frozen objects itself, they would be unfrozen.
        if gc.get_count()[0] > MANY and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        gc.enable()
