"""Tells where a model cannot be written; imports little, so that a wrong folder is told at once."""

from __future__ import annotations

import os
from pathlib import Path

from mmdeploy_llm.errors import ConfigError


def check_new_folder(output: Path, *, overwrite: bool) -> None:
    """Raises ConfigError for a folder that cannot be written to; overwrite: whether a model's
    folder is replaced."""
    if not os.path.lexists(output):
        return
    if output.is_symlink():
        raise ConfigError(f"{output} is a link; give the folder that it leads to")
    if not output.is_dir():
        raise ConfigError(f"{output} is a file or a device; give the name of a new folder")
    if not overwrite:
        raise ConfigError(f"{output} exists; give another folder, or overwrite to replace it")
    if any(output.iterdir()) and not (output / "config.json").exists():
        raise ConfigError(f"{output} has no config.json: only the folder of a model is replaced")
