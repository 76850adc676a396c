"""Bounds what a config may make of a model, while the model is built on the meta device.

A config that passes its own checks may still multiply: layers by experts by heads. Tensors are
counted as they are made, so that an absurd model ends within seconds instead of after hours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mmdeploy_llm.errors import CheckpointError

MAX_PARTS = 500_000  # tensors; the largest published models have 150,000
MAX_VALUES = 2**44  # 17.6 trillion values
# The functions by which modules make their parameters and buffers.
MAKERS: Final = frozenset(
    {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.tensor}
)


@contextmanager
def bounded_building(max_parts: int = MAX_PARTS, max_values: int = MAX_VALUES) -> Iterator[None]:
    """Raises CheckpointError in the block when this thread makes a model that is too large. Other
    threads are not touched: they may build models of their own."""
    with _Counter(max_parts, max_values):
        yield


class _Counter(TorchFunctionMode):
    """Counts the tensors that its thread makes, and their values."""

    def __init__(self, max_parts: int, max_values: int) -> None:
        super().__init__()
        self._max_parts = max_parts
        self._max_values = max_values
        self._num_parts = 0
        self._num_values = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls the function, and counts a tensor that it makes."""
        made = func(*args, **(kwargs or {}))
        if func in MAKERS and isinstance(made, Tensor):
            self._add(made.numel())
        return made

    def _add(self, num_values: int) -> None:
        self._num_parts += 1
        self._num_values += num_values
        if self._num_parts > self._max_parts:
            raise CheckpointError(
                f"config.json of the model makes more than {self._max_parts} weights and buffers; "
                f"allowed: {self._max_parts}. Check its numbers of layers and experts"
            )
        if self._num_values > self._max_values:
            raise CheckpointError(
                f"config.json of the model makes more than {self._max_values:.3g} weights; allowed:"
                f" {self._max_values:.3g}. Check its sizes, layers and experts"
            )
