"""AdapterOptions: the options of an engine that say which adapters it has, and how much of them."""

from __future__ import annotations

from pydantic import Field

from .option_types import Adapters
from .plugin_choice import PluginChoice


class AdapterOptions(PluginChoice):
    """The LoRA adapters of an engine."""

    adapters: Adapters = Field(
        default={},
        description='LoRA adapters by name: {"sql": "adapters/sql"}, each a PEFT folder or an id '
        "on the hub; a prompt names the one that it is computed with",
    )
    max_adapters: int = Field(
        default=8,
        ge=1,
        description="upper bound on adapters in memory, and in one step; others are read again "
        "when a prompt needs them",
    )
    adapter_memory: int | None = Field(
        default=None,
        ge=1,
        description="bytes that adapters in memory may take together; None: what max_adapters take",
    )
    max_adapter_rank: int | None = Field(
        default=None,
        ge=1,
        description="upper bound on the rank of an adapter; None: any",
    )
