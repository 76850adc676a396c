"""Engines on a Ray cluster: LLMWorker and caption_dataset for Ray Data, ClusterLLM for a batch.

    rows, blocks    columns of a dataset -> prompts -> columns; a block of prompts -> its answers
    deaths          which rows were being computed when a process died
    sizes           the resources that an engine takes of a machine
    cluster         the only file that imports ray: actors, the pool, the dataset

Needs the extra `ray` (ray[data]) on every machine of the cluster. The names below are imported when
they are first used: the actor that counts deaths needs neither torch nor a model.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cluster import ClusterLLM, LLMWorker, caption_dataset, connect
    from .rows import Columns

__all__ = ["ClusterLLM", "Columns", "LLMWorker", "caption_dataset", "connect"]


def __getattr__(name: str) -> Any:
    """Imports a public name from the module that defines it (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "rows" if name == "Columns" else "cluster"
    return getattr(import_module(f".{home}", __name__), name)
