"""Finds the weight files of a model folder. Only safetensors files are ever opened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmdeploy_llm.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


def find_weights(folder: Path) -> tuple[Path, ...]:
    """Returns the safetensors files of `folder`, at least one, in a fixed order.

    That is model.safetensors if it exists, else the files that the index names, else every
    *.safetensors. Raises CheckpointError when there are none, when files of the index are missing,
    and when the index is malformed.
    """
    if (folder / SINGLE_FILE).is_file():
        return (folder / SINGLE_FILE,)
    if (folder / INDEX_FILE).is_file():
        return _shards(folder, _weight_map(folder / INDEX_FILE))
    files = tuple(sorted(folder.glob("*.safetensors")))
    if not files:
        raise CheckpointError(_nothing_found(folder))
    return files


def _weight_map(index: Path) -> dict[Any, Any]:
    try:
        parsed = json.loads(index.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{index} is not readable JSON: {error}") from error
    weight_map = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no 'weight_map' that names files")
    return weight_map


def _shards(folder: Path, weight_map: dict[Any, Any]) -> tuple[Path, ...]:
    names = sorted({str(name) for name in weight_map.values()})
    outside = [name for name in names if Path(name).name != name or name in (".", "..")]
    if outside:
        raise CheckpointError(
            f"{folder / INDEX_FILE} names {outside[0]!r}; weight files must lie in the same folder"
        )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(names)} weight files named in {INDEX_FILE} are not in "
            f"{folder}: {', '.join(missing[:10])}; download them again"
        )
    return tuple(folder / name for name in names)


def _nothing_found(folder: Path) -> str:
    pickles = sorted(p.name for p in folder.glob("*") if p.suffix in PICKLE_SUFFIXES)
    if pickles:
        return (
            f"{folder} holds weights only as {', '.join(pickles[:3])}: these are pickle files, "
            "which can run any code when opened, and are refused. Convert them with "
            "transformers' save_pretrained, which writes safetensors, or use a revision of the "
            "model that has *.safetensors"
        )
    return (
        f"no *.safetensors file in {folder}; a model folder holds {SINGLE_FILE}, or {INDEX_FILE} "
        "and the files it names"
    )
