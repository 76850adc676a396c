"""Reads the folder of an adapter, as PEFT and those that follow it write it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.system.guarding.folder_files import ADAPTER_CONFIG, check_adapter, check_regular
from mmdeploy_llm.weights.files import SafetensorsFile
from mmdeploy_llm.weights.find import PICKLE_SUFFIXES
from mmdeploy_llm.weights.tensor_file import Entry

from .adapter import Adapter
from .config import LoraConfig, is_saved, read_config
from .weights import Keys, Site, change_of, check_entry, sites_of, sort_keys, tokens_of

WEIGHTS = "adapter_model.safetensors"
CODE_SUFFIXES = (".py", ".pyc", ".so", ".dll", ".dylib", ".sh")
PICKLES = (*PICKLE_SUFFIXES, ".pkl", ".pickle")
# What training leaves beside an adapter to go on from; it is never opened.
TRAINING = ("optimizer", "scheduler", "scaler", "training_args", "rng_state", "global_step")


def read_adapter(
    folder: str | Path,
    *,
    max_rank: int | None = None,
    max_bytes: int | None = None,
    is_of_model: bool = False,
) -> Adapter:
    """Returns the adapter in `folder`. is_of_model: whether the folder is a model's, whose other
    files are no matter. Raises CheckpointError for what is wrong with it or cannot be served, for a
    rank over `max_rank` and for tensors of more than `max_bytes`."""
    folder = Path(folder)
    if not is_of_model:
        check_others(folder)
    check_files(folder)
    config = read_config(folder)
    with SafetensorsFile(folder / WEIGHTS) as file:
        for key, entry in file.entries.items():
            check_entry(key, entry)
        keys = sort_keys(file.entries, config)
        if not file.entries:
            raise CheckpointError(f"{folder / WEIGHTS} holds no tensors")
        sites = sites_of(keys, config)
        _check_limits(sites, file.entries, max_rank, max_bytes)
        return _read(folder, config, keys, sites, file)


def check_others(folder: Path) -> None:
    """Raises CheckpointError where a library could run a file of the folder."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder of an adapter")
    for path in sorted(folder.iterdir()):
        is_training = path.name.startswith(TRAINING)
        if path.suffix in (*CODE_SUFFIXES, *PICKLES) and not is_training:
            kind = "code" if path.suffix in CODE_SUFFIXES else "a pickle, which can run code"
            raise CheckpointError(
                f"{path.name} in the adapter's folder {folder} is {kind}; only safetensors are "
                "read. Load the adapter with PEFT where you trust it, save it with "
                "save_pretrained(FOLDER), and give that folder"
            )


def check_files(folder: Path) -> None:
    """Raises CheckpointError unless `folder` has the files of an adapter."""
    check_adapter(folder, (ADAPTER_CONFIG, WEIGHTS))
    for name in (ADAPTER_CONFIG, WEIGHTS):
        check_inside(folder, folder / name)
        check_regular(folder / name)


def check_inside(folder: Path, path: Path) -> None:
    """Raises CheckpointError for a link that leads out of the folder, but to the blobs of the hub's
    cache: cache/blobs/HASH, cache/snapshots/REVISION/NAME."""
    real, root = path.resolve(), folder.resolve()
    is_cached = root.parent.name == "snapshots" and real.parent == root.parents[1] / "blobs"
    if not (real.is_relative_to(root) or is_cached):
        raise CheckpointError(
            f"{path} is a link out of the adapter's folder, which is not followed; put the file "
            "there instead"
        )


def _check_limits(
    sites: Sequence[Site], entries: Mapping[str, Entry], max_rank: int | None, max_bytes: int | None
) -> None:
    rank = max((site.rank for site in sites), default=0)
    if max_rank is not None and rank > max_rank:
        raise CheckpointError(
            f"the adapter has the rank {rank}; at most {max_rank} is allowed, raise "
            "max_adapter_rank"
        )
    size = sum(torch.Size(x.shape).numel() * x.dtype.itemsize for x in entries.values())
    if max_bytes is not None and size > max_bytes:
        raise CheckpointError(
            f"the adapter has {size} bytes; at most {max_bytes} are allowed, raise adapter_memory"
        )


def _read(
    folder: Path, config: LoraConfig, keys: Keys, sites: Sequence[Site], file: SafetensorsFile
) -> Adapter:
    def read(key: str) -> Tensor:
        tensor = torch.empty(file.entries[key].shape, dtype=file.entries[key].dtype)
        file.read_into(key, tensor, first_value=0, transpose=False)
        if not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{key} of the adapter has values that are not finite")
        return tensor

    for name in config.modules_to_save or ():
        if not any(is_saved(name, path) for path in keys.saved):
            raise CheckpointError(f"the adapter lacks {name}, which modules_to_save names")
    changes = {site.path: change_of(site, file.entries, config, read) for site in sites}
    embeddings = {site.path for site in sites if "lora_embedding_A" in site.keys}
    return Adapter(
        name=folder.name,
        digest=_digest(folder),
        modules={path: own for path, own in changes.items() if path not in embeddings},
        embeddings={path: own for path, own in changes.items() if path in embeddings},
        saved={path: read(key) for path, key in keys.saved.items()},
        tokens=tokens_of(keys, file.entries, config, read),
        config=config,
    )


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in (ADAPTER_CONFIG, WEIGHTS):
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
