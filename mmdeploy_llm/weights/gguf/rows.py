"""Reads rows of the tensors of GGUF files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.system.portable import files

from .header import StoredTensor

SLICE_VALUES = 2**18  # dequantised at a time: what they need stays in a core's cache


class TensorRows:
    """The open files of one model, used as a context manager. Nothing is mapped into memory: a file
    that shrinks while it is read is an error, not a crash."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._descriptors: list[int] = []
        self._stack = ExitStack()
        # NumPy computes without the interpreter's lock, and each call on one core.
        self._pool = ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="gguf")

    def __enter__(self) -> TensorRows:
        self._stack.callback(self._pool.shutdown)
        try:
            for path in self._paths:
                descriptor = os.open(path, os.O_RDONLY | files.NO_WAIT)
                self._stack.callback(os.close, descriptor)
                self._descriptors.append(descriptor)
        except OSError as error:
            self._stack.close()
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, tensor: StoredTensor, start: int, end: int) -> Tensor:
        """Returns rows start .. end of a tensor, seen as a matrix [all other axes, last axis], as
        plain floats or dequantised to float32."""
        data = self.read_bytes(tensor, start, end)
        if tensor.type.dtype is not None:
            return tensor.type.rows(data)
        out = torch.empty(end - start, tensor.shape[-1])
        step = max(1, SLICE_VALUES // tensor.shape[-1])

        def fill(first: int) -> None:
            out[first : first + step] = tensor.type.rows(data[first : first + step])

        for _ in self._pool.map(fill, range(0, end - start, step)):
            pass
        return out

    def read_bytes(
        self, tensor: StoredTensor, start: int, end: int
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Returns rows start .. end of a tensor as they are stored, [rows, bytes of a row]."""
        data = np.empty((end - start, tensor.row_bytes), dtype=np.uint8)
        self._fill(tensor.file, data.reshape(-1).data, tensor.offset + start * data.shape[1])
        return data

    def _fill(self, file: int, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            count = files.read_into(self._descriptors[file], view[done:], offset + done)
            if count == 0:
                raise CheckpointError(
                    f"{self._paths[file]} ended early: it changed while it was being read"
                )
            done += count
