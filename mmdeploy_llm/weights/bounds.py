"""Bounds what a config may make of a model, while the model is built on the meta device.

A config that passes its own checks may still multiply: layers by experts by heads. Modules are
counted as they come, so that an absurd model ends within seconds instead of after hours.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules import module as hooks

from mmdeploy_llm.errors import CheckpointError

MAX_PARTS = 500_000  # modules and parameters; the largest published models have 150,000
MAX_VALUES = 2**44  # 17.6 trillion parameters


@contextmanager
def bounded_building(max_parts: int = MAX_PARTS, max_values: int = MAX_VALUES) -> Iterator[None]:
    """Raises CheckpointError in the block when this thread makes a model that is too large."""
    counter = _Counter(max_parts, max_values)
    handles = (
        hooks.register_module_module_registration_hook(counter.add_module),
        hooks.register_module_parameter_registration_hook(counter.add_parameter),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Counter:
    """Counts what one thread registers. torch calls the hooks for every module of the process."""

    def __init__(self, max_parts: int, max_values: int) -> None:
        self._max_parts = max_parts
        self._max_values = max_values
        self._thread = threading.get_ident()
        self._num_parts = 0
        self._num_values = 0

    def add_module(self, owner: nn.Module, name: str, child: Any) -> None:
        """Counts a module. Returns None: nothing replaces it."""
        self._add(0)

    def add_parameter(self, owner: nn.Module, name: str, param: Any) -> None:
        """Counts a parameter with its values."""
        self._add(0 if param is None else param.numel())

    def _add(self, num_values: int) -> None:
        if threading.get_ident() != self._thread:
            return
        self._num_parts += 1
        self._num_values += num_values
        if self._num_parts > self._max_parts:
            raise CheckpointError(
                f"config.json of the model makes more than {self._max_parts} modules and "
                f"parameters; allowed: {self._max_parts}. Check its numbers of layers and experts"
            )
        if self._num_values > self._max_values:
            raise CheckpointError(
                f"config.json of the model makes more than {self._max_values:.3g} weights; allowed:"
                f" {self._max_values:.3g}. Check its sizes, layers and experts"
            )
