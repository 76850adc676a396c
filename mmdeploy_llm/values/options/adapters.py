"""AdapterOptions: the options of an engine that say which adapters it has, and how much of them."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from .plugin_choice import PluginChoice
from .types import Adapters


class AdapterOptions(PluginChoice):
    """The LoRA adapters of an engine."""

    adapters: Adapters = Field(
        default={},
        description='LoRA adapters by name: {"sql": "adapters/sql"}, each a PEFT folder or an id '
        "on the hub; a prompt names the one that it is computed with",
    )
    default_adapter: str = Field(
        default="",
        description='name of the adapter of prompts that name none; a prompt that names "" has the '
        "model alone; empty: the model alone",
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

    @model_validator(mode="after")
    def _the_default_is_known(self) -> Self:
        if self.default_adapter and self.default_adapter not in self.adapters:
            known = ", ".join(self.adapters) or "none"
            raise ValueError(
                f"default_adapter is {self.default_adapter!r}, which is not among adapters "
                f"({known}); "
                'give its folder too: adapters={"name": folder}, or --adapter name=folder'
            )
        return self
