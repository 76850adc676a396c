"""Reads tensors of a safetensors file directly into allocated memory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.system.guarding.folder_files import check_regular
from mmdeploy_llm.system.portable.files import NO_WAIT, read_into
from mmdeploy_llm.weights.tensor_file import Entry

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    # Parts of quantised weights.
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BOOL": torch.bool,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
}
LOADABLE = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
# Tensors whose dtype or device changes pass through a buffer of this many bytes.
STAGING_BYTES = 32 * 2**20
MAX_TENSORS = 200_000  # of a file; the largest published models have 150,000 in all their files


class SafetensorsFile:
    """An open safetensors file, used as a context manager. `entries`: key -> stored tensor."""

    def __init__(self, path: Path) -> None:
        """Opens the file and reads its header. Raises CheckpointError when it is not a complete
        safetensors file of supported dtypes."""
        self.path = path
        self.entries = _read_entries(path)
        self._fd = os.open(path, os.O_RDONLY | NO_WAIT)

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def read_into(self, key: str, out: Tensor, *, first_value: int, transpose: bool) -> None:
        """See TensorFile."""
        entry = self.entries[key]
        offset = entry.offset + first_value * entry.dtype.itemsize
        if transpose:
            for number, matrix in enumerate(out.view(-1, *out.shape[-2:])):
                whole = torch.empty(matrix.T.shape, dtype=entry.dtype)
                self._fill(whole, offset + number * whole.nbytes)
                matrix.copy_(whole.T)
        elif out.device.type == "cpu" and out.dtype is entry.dtype:
            self._fill(out, offset)
        else:
            self._fill_staged(out.view(-1), entry.dtype, offset)

    def _fill_staged(self, out: Tensor, dtype: torch.dtype, offset: int) -> None:
        """Fills `out` [n] through a small buffer, chunk by chunk."""
        size = STAGING_BYTES // dtype.itemsize
        buffer = torch.empty(min(size, out.numel()), dtype=dtype)
        for start in range(0, out.numel(), size):
            chunk = buffer[: out.numel() - start]
            self._fill(chunk, offset + start * dtype.itemsize)
            out[start : start + chunk.numel()].copy_(chunk)

    def _fill(self, out: Tensor, offset: int) -> None:
        """Reads the bytes at `offset` into `out`, which is contiguous in CPU memory."""
        if out.numel() == 0:
            return
        data: Any = out.view(-1).view(torch.uint8).numpy()
        view = memoryview(data)
        done = 0
        while done < len(view):
            count = read_into(self._fd, view[done:], offset + done)
            if count == 0:
                raise CheckpointError(
                    f"{self.path} ended early: it changed while it was being read"
                )
            done += count


def _read_entries(path: Path) -> dict[str, Entry]:
    check_regular(path)
    try:
        with safe_open(path, framework="pt"):
            pass  # the library checks sizes and offsets in the header, and the size of the data
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (OSError, ValueError, RecursionError, MemoryError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is not a valid safetensors file ({error}); it may be truncated or a Git LFS "
            "pointer: download it again"
        ) from error
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise CheckpointError(
            f"{path} holds {len(header)} tensors, {MAX_TENSORS} are allowed in a file; a model of "
            "so many parts is split into several files"
        )
    return {key: _entry(path, key, raw, 8 + length) for key, raw in header.items()}


def _entry(path: Path, key: str, raw: Mapping[str, Any], data_start: int) -> Entry:
    if raw["dtype"] not in DTYPES:
        raise CheckpointError(
            f"{key} in {path} has dtype {raw['dtype']}; supported dtypes: {', '.join(DTYPES)}"
        )
    begin, end = raw["data_offsets"]
    entry = Entry(dtype=DTYPES[raw["dtype"]], shape=tuple(raw["shape"]), offset=data_start + begin)
    assert end - begin == math.prod(entry.shape) * entry.dtype.itemsize, "checked by safe_open"
    return entry
