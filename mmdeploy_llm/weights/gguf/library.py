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


def known_keys(architecture: str) -> Mapping[str, tuple[str, ...]]:
    """Returns the keys that checkpoints of all kinds have for a tensor, by its name in GGUF, both
    without ".weight" and ".bias" and with "{bid}" for the number of the layer.

    The package maps keys to names, for one architecture without doubt: only keys that lead to the
    name are returned. Of an architecture that it does not know, all tensors are.
    """
    from gguf import MODEL_ARCH_NAMES, MODEL_TENSOR, MODEL_TENSORS, TENSOR_NAMES
    from gguf.tensor_mapping import TensorNameMap

    numbers: Mapping[str, Any] = {name: key for key, name in MODEL_ARCH_NAMES.items()}
    number = numbers.get(architecture)
    tables = (TensorNameMap.mappings_cfg, TensorNameMap.block_mappings_cfg)
    if number is None:
        tensors, leads = list(MODEL_TENSOR), None
    else:
        tensors, leads = MODEL_TENSORS[number], TensorNameMap(number, 1).mapping
    found: dict[str, tuple[str, ...]] = {}
    for tensor in tensors:
        name = TENSOR_NAMES[tensor]
        keys = [key for table in tables for key in table.get(tensor, ())]
        if leads is not None:
            wanted = tensor, name.replace("{bid}", "0")
            keys = [key for key in keys if leads.get(key.replace("{bid}", "0")) == wanted]
        found[name] = (*found.get(name, ()), *keys)
    return found
