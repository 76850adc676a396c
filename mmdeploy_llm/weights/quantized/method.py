"""Stored: the tensors of a checkpoint as a format of weights gets them, and checks of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.weights.files import SafetensorsFile
from mmdeploy_llm.weights.tensor_file import Entry

FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32})


@dataclass(frozen=True, slots=True)
class Stored:
    """The stored tensors of all files of a checkpoint, by key."""

    entries: Mapping[str, Entry]
    files: Mapping[str, SafetensorsFile]

    def read(self, key: str, out: Tensor | None = None) -> Tensor:
        """Reads a whole tensor. out: where to, if the tensor has its shape and dtype."""
        entry = self.entries[key]
        if out is None or (out.dtype, tuple(out.shape)) != (entry.dtype, entry.shape):
            out = torch.empty(entry.shape, dtype=entry.dtype)
        self.files[key].read_into(key, out, first_value=0, transpose=False)
        return out

    def names(self, suffix: str) -> Iterator[str]:
        """Yields the names of layers with a tensor of this suffix, such as ".qweight"."""
        for key in self.entries:
            if key.endswith(suffix):
                yield key.removesuffix(suffix)

    def parts(
        self, name: str, needed: Mapping[str, str], optional: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """Returns the keys of a layer's tensors by role. needed, optional: role -> suffix. Raises
        CheckpointError when a needed one is missing."""
        missing = [suffix for suffix in needed.values() if name + suffix not in self.entries]
        if missing:
            raise CheckpointError(
                f"the quantised layer {name} has no tensor {name}{missing[0]}; the files are "
                "incomplete, or quantization_config in config.json belongs to others"
            )
        found = {role: name + suffix for role, suffix in needed.items()}
        for role, suffix in (optional or {}).items():
            if name + suffix in self.entries:
                found[role] = name + suffix
        return found

    def check(self, key: str, shape: tuple[int, ...] | None, *dtypes: torch.dtype) -> Entry:
        """Returns an entry. Raises CheckpointError when its shape or dtype is not as it must be.
        shape: None accepts any."""
        entry = self.entries[key]
        if entry.dtype not in dtypes or (shape is not None and entry.shape != shape):
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise CheckpointError(
                f"{key} in {self.files[key].path} is {str(entry.dtype).removeprefix('torch.')} "
                f"{list(entry.shape)}, but must be {names}"
                + (f" {list(shape)}" if shape is not None else "")
                + ": config.json and the weights do not belong together"
            )
        return entry

    def matrix(self, key: str, dtype: torch.dtype) -> tuple[int, int]:
        """Returns the shape of a stored matrix. Raises CheckpointError for anything else."""
        shape = self.check(key, None, dtype).shape
        if len(shape) != 2 or not all(shape):
            raise CheckpointError(
                f"{key} in {self.files[key].path} has shape {list(shape)}, but must be a matrix"
            )
        return shape[0], shape[1]


def refuse(method: str, found: str, supported: str, name: str) -> CheckpointError:
    """Returns the error for a scheme that is not supported. name: of a layer that has it."""
    return CheckpointError(
        f"layer {name} is quantised by {method} with {found}, which is not supported; supported: "
        f"{supported}"
    )


def group_columns(key: str, k: int, num_groups: int, group_size: int) -> int:
    """Returns the columns of a group: `group_size` of the config if this makes as many groups, else
    what divides the k columns evenly, since layers may have groups of their own. Raises
    CheckpointError where nothing does. key: of the scales."""
    size = k if group_size <= 0 else group_size
    if -(-k // size) == num_groups:
        return size
    if num_groups == 0 or k % num_groups:
        raise CheckpointError(
            f"{key} has {num_groups} groups for {k} columns, but groups of {size} columns, as "
            f"config.json says, are {-(-k // size)}: config.json and the weights do not belong "
            "together"
        )
    return k // num_groups
