"""Finds the folder of a model by name and reads the folder's JSON files."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import Checkpoint

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
TOKENIZER_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
MODEL_FILES = (*TOKENIZER_FILES, "*.safetensors", "*.ttf")


def bundled_models() -> dict[str, Path]:
    """Returns name -> folder of the models that are part of this package."""
    root = Path(__file__).parents[1] / "bundled"
    folders = root.iterdir() if root.is_dir() else ()
    return {path.name: path for path in sorted(folders) if (path / "config.json").is_file()}


def resolve_model(
    name: str, revision: str | None = None, patterns: tuple[str, ...] = MODEL_FILES
) -> Path:
    """Returns the folder of a model: a local folder, a bundled model's name, or a hub id, in this
    order.

    Only files of a hub repository that match `patterns` are fetched. Raises CheckpointError when
    there is no such model, or when the hub cannot be reached and its cache does not have it.
    """
    folder = Path(name).expanduser()
    bundled = bundled_models()
    if name in bundled and not (folder / "config.json").is_file():
        return bundled[name]
    if folder.is_dir():
        return folder
    if folder.is_absolute() or name.startswith((".", "~")) or not HUB_ID.fullmatch(name):
        near = difflib.get_close_matches(name, bundled, n=1)
        hint = f"did you mean the bundled model {near[0]!r}?" if near else _known(bundled)
        raise CheckpointError(f"there is no model {name!r}: no such folder; {hint}")
    return _from_hub(name, revision, patterns)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Reads the JSON files of a model folder, without running code of the checkpoint.

    Raises CheckpointError for a folder without config.json, a malformed file, and an architecture
    that transformers does not know.
    """
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"the folder {str(folder)!r} has no config.json; give the folder of a model in "
            "transformers' format"
        )
    return Checkpoint(
        folder=folder,
        config=_config(folder),
        preprocessor=_preprocessor(folder, "image_processor", "preprocessor_config.json"),
        video_preprocessor=_preprocessor(
            folder, "video_processor", "video_preprocessor_config.json"
        ),
        generation=read_json(folder / "generation_config.json"),
    )


def read_json(path: Path) -> Mapping[str, Any]:
    """Reads a JSON object from a file, {} when there is no such file. Raises CheckpointError."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} of the model cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path.name} of the model must hold a JSON object")
    return values


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises whatever its config classes raise
        raise CheckpointError(
            f"config.json of the model cannot be used: {type(error).__name__}: {error}"
        ) from error


def _preprocessor(folder: Path, name: str, file_name: str) -> Mapping[str, Any]:
    """Reads a processor's options; the newer processor_config.json wins, as in transformers."""
    nested = read_json(folder / "processor_config.json").get(name)
    return nested if isinstance(nested, dict) else read_json(folder / file_name)


def _from_hub(name: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        path = snapshot_download(name, revision=revision, allow_patterns=list(patterns))
    except Exception as error:  # network errors can have any type
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{name!r} is no local folder, and the hub did not return it: "
            f"{type(error).__name__}: {reason}\nCheck the name and the connection, or give a folder"
        ) from error
    return Path(path)


def _known(bundled: Mapping[str, Path]) -> str:
    names = ", ".join(bundled) or "none"
    return f"give a folder, a hub id such as 'organisation/name', or a bundled model ({names})"
