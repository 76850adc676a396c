"""Finds the weight files of a model folder. Only safetensors files are ever opened."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.system.guarding.folder_files import (
    MAX_INDEX_BYTES,
    check_regular,
    read_object,
    validated,
)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_NAME = 255  # characters of a file's name
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


def find_weights(folder: Path) -> tuple[Path, ...]:
    """Returns the safetensors files of `folder`, at least one, in a fixed order.

    That is model.safetensors if it exists, else the files that the index names, else every
    *.safetensors. Raises CheckpointError when there are none, when files of the index are missing,
    and when the index is malformed.
    """
    if (folder / SINGLE_FILE).exists():
        check_regular(folder / SINGLE_FILE)
        return (folder / SINGLE_FILE,)
    if (folder / INDEX_FILE).exists():
        return _shards(folder, _weight_map(folder / INDEX_FILE))
    files = tuple(sorted(folder.glob("*.safetensors")))
    if not files:
        raise CheckpointError(_nothing_found(folder))
    for path in files:
        check_regular(path)
    return files


def _is_weight_map(value: Any) -> Any:
    is_good = isinstance(value, dict) and value
    if not is_good or not all(_is_name(name) for name in value.values()):
        raise ValueError(f"an object whose values name files, {MAX_NAME} characters at most")
    return value


def _is_name(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name.encode()) <= MAX_NAME and "\0" not in name


class IndexFile(BaseModel):
    """model.safetensors.index.json. weight_map: key of a tensor -> name of a file."""

    weight_map: Annotated[Any, BeforeValidator(_is_weight_map)] = None

    model_config = {"validate_default": True}


def _weight_map(index: Path) -> dict[str, str]:
    values = read_object(index, MAX_INDEX_BYTES)
    found: dict[str, str] = validated(IndexFile, index.name, values).weight_map
    return found


def _shards(folder: Path, weight_map: dict[str, str]) -> tuple[Path, ...]:
    names = sorted(set(weight_map.values()))
    outside = [name for name in names if Path(name).name != name or name in (".", "..")]
    if outside:
        raise CheckpointError(
            f"{folder / INDEX_FILE} names {outside[0]!r}; weight files must lie in the same folder"
        )
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(names)} weight files named in {INDEX_FILE} are not in "
            f"{folder}: {', '.join(missing[:10])}; download them again"
        )
    paths = tuple(folder / name for name in names)
    for path in paths:
        check_regular(path)
    return paths


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
