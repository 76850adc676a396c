"""Reads the folder of an adapter, as PEFT and those that follow it write it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.weights.files import SafetensorsFile

from .adapter import Adapter, LowRank
from .config import CONFIG, read_settings

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."


def read_adapter(folder: str | Path, *, max_rank: int | None = None) -> Adapter:
    """Returns the adapter in `folder`. Raises CheckpointError for what is wrong with it or cannot
    be served, and for ranks over `max_rank`."""
    folder = Path(folder)
    settings = read_settings(folder)
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in _read_tensors(folder / WEIGHTS).items():
        path, _, kind = key.removeprefix(PREFIX).rpartition(".lora_")
        halves.setdefault(path, {})[kind.split(".")[0]] = tensor
    modules = {
        path: LowRank(a=half["A"], b=half["B"], scale=settings.scale())
        for path, half in halves.items()
    }
    if max_rank is not None and settings.r > max_rank:
        raise CheckpointError(f"the adapter {folder.name} has rank {settings.r}, over {max_rank}")
    return Adapter(
        name=folder.name,
        digest=_digest(folder),
        modules=modules,
        embeddings={},
        saved={},
        tokens={},
    )


def _read_tensors(path: Path) -> Mapping[str, Tensor]:
    tensors = {}
    with SafetensorsFile(path) as file:
        for key, entry in file.entries.items():
            tensor = torch.empty(entry.shape, dtype=entry.dtype)
            file.read_into(key, tensor, first_value=0, transpose=False)
            tensors[key] = tensor
    return tensors


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()
