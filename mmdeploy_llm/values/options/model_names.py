"""Finds what the name of a model means; imports little, so that a wrong one is told at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path

from mmdeploy_llm.errors import CheckpointError

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
GGUF_SUFFIX = ".gguf"


def bundled_models() -> dict[str, Path]:
    """Returns name -> folder of the models that are part of this package."""
    root = Path(__file__).parents[2] / "bundled"
    folders = root.iterdir() if root.is_dir() else ()
    return {path.name: path for path in sorted(folders) if (path / "config.json").is_file()}


def find_model(name: str) -> Path | None:
    """Returns the place of a model: a local folder or file, or the folder of a bundled model's
    name, in this order; None for the id of a hub. Raises CheckpointError for anything else."""
    bundled = bundled_models()
    if not name:
        raise CheckpointError(f"the name of the model is empty; {_known(bundled)}")
    try:
        folder = Path(name).expanduser()
        if name in bundled and not (folder / "config.json").is_file():
            return bundled[name]
        if folder.is_dir() or folder.is_file():
            return folder
    except (OSError, RuntimeError) as error:  # a name that is too long, ~ of an unknown user
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"there is no model {name[:100]!r}: {reason}") from error
    if folder.is_absolute() or name.startswith((".", "~")) or not HUB_ID.fullmatch(name):
        near = difflib.get_close_matches(name, bundled, n=1)
        hint = f"did you mean the bundled model {near[0]!r}?" if near else _known(bundled)
        raise CheckpointError(f"there is no model {name!r}: no such folder; {hint}")
    return None


def is_cached(name: str) -> bool:
    """Whether the hub's cache has a version of a repository, or a part of one."""
    from huggingface_hub import constants  # which imports little

    folder = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "snapshots")
    return folder.is_dir()


def check_offline(name: str) -> None:
    """Raises CheckpointError for the id of a hub that cannot be had: its cache has nothing of it,
    and nothing may be fetched."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE and not is_cached(name):
        raise CheckpointError(
            f"{name!r} is no local folder, and the hub did not return it: HF_HUB_OFFLINE is set, "
            "and the hub's cache has nothing of it. Check the name, or give a folder"
        )


def _known(bundled: Mapping[str, Path]) -> str:
    names = ", ".join(bundled) or "none"
    return f"give a folder, a hub id such as 'organisation/name', or a bundled model ({names})"
