"""Says whether a folder is that of an adapter."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mmdeploy_llm.errors import CheckpointError

CONFIG = "adapter_config.json"


def check_adapter(folder: Path, names: Iterable[str] = (CONFIG,)) -> None:
    """Raises CheckpointError unless `folder` has these files of an adapter."""
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} has no {name}: it is not the folder of a PEFT adapter")
