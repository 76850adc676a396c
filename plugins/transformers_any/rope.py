"""Handles rotary embeddings whose frequencies depend on the length of the sequence.

A step holds tokens of many sequences, and the length of one must not set another's frequencies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from .interface import refused

LONG = "longrope"


def check(name: str, decoder: nn.Module) -> int | None:
    """Returns the first position of a sequence that switches frequencies, None without one.

    Raises ModelNotSupportedError for frequencies that change with every length.
    """
    for path, module in decoder.named_modules():
        kinds = _kinds(module)
        if any("dynamic" in kind for kind in kinds):
            what = f"{path} ({type(module).__name__})"
            raise refused(name, what, "changes all frequencies with the length of the sequence")
        if LONG in kinds:
            config: Any = module.config
            return int(config.rope_parameters["original_max_position_embeddings"])
    return None


def fix(decoder: nn.Module) -> None:
    """Fixes the frequencies of short sequences for good: positions no longer change them."""
    for module in decoder.modules():
        if LONG in _kinds(module):
            module.rope_type = "fixed"  # type: ignore[assignment]


@contextmanager
def fixed(decoder: nn.Module) -> Iterator[None]:
    """Fixes the frequencies as `fix` does, while the block runs."""
    changed = [module for module in decoder.modules() if LONG in _kinds(module)]
    for module in changed:
        module.rope_type = "fixed"  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in changed:
            module.rope_type = LONG  # type: ignore[assignment]


def _kinds(module: nn.Module) -> list[str]:
    kind = getattr(module, "rope_type", None)
    if isinstance(kind, dict):
        return [str(value) for value in kind.values()]
    return [kind] if isinstance(kind, str) else []
