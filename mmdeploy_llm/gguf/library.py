"""The package `gguf`, which owns the format: types of tensors and their dequantisation. No other
file imports it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from mmdeploy_llm.errors import CheckpointError

INSTALL = 'pip install "mmdeploy-llm[gguf]"'
PLAIN: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorType:
    """How values are stored: blocks of `block_size` values in `block_bytes` bytes.

    number: in the file. dtype: of plain floats; None: blocks of quantised values.
    """

    name: str
    number: int
    block_size: int
    block_bytes: int
    dtype: torch.dtype | None

    def rows(self, data: np.ndarray[Any, np.dtype[np.uint8]]) -> torch.Tensor:
        """Returns the values of `data` [n, bytes of a row] as [n, k], in the type's own dtype, or
        dequantised to float32."""
        if self.dtype is not None:
            return torch.from_numpy(data).view(self.dtype)
        import gguf

        with np.errstate(all="ignore"):  # scales of a file may be infinite
            values = gguf.dequantize(data, gguf.GGMLQuantizationType(self.number))
        return torch.from_numpy(np.ascontiguousarray(values))


def check_installed() -> None:
    """Raises CheckpointError, with the command to run, when the package is not installed."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise CheckpointError(
            f"reading a GGUF file needs the package gguf, which is not installed: {INSTALL}"
        ) from error


def readable_types() -> Mapping[int, TensorType]:
    """Returns the types that can be read, by number: plain floats, and whatever the installed
    package dequantises. Raises CheckpointError when it is not installed."""
    check_installed()
    import gguf

    return {
        int(kind): TensorType(
            name=kind.name,
            number=int(kind),
            block_size=block_size,
            block_bytes=block_bytes,
            dtype=PLAIN.get(kind.name),
        )
        for kind, (block_size, block_bytes) in gguf.GGML_QUANT_SIZES.items()
        if kind.name in PLAIN or _can_dequantize(kind, block_bytes)
    }


def type_name(number: int) -> str:
    """Returns the name of a type for a message, its number where the package does not know it."""
    import gguf

    try:
        return str(gguf.GGMLQuantizationType(number).name)
    except ValueError:
        return str(number)


def _can_dequantize(kind: Any, block_bytes: int) -> bool:
    import gguf

    try:
        gguf.dequantize(np.zeros((1, block_bytes), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True
