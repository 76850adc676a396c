"""Options of which plugins serve a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from mmdeploy_llm.values.options.engine_flags import EngineFlags

from .groups import Given, Group, Rows

if TYPE_CHECKING:
    from mmdeploy_llm.hooks import KindTable


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderOptions(Group):
    """Which plugins serve a model."""

    title: ClassVar[str] = "Model"

    chosen: Annotated[Given, Rows(EngineFlags, "plugin_files", "use")]

    def choice(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what is given of these options and of `chosen`, which the environment says of
        plugins, see cli.plugin_names."""
        return {**self.chosen, **chosen}

    def kinds(self, chosen: Mapping[str, Any]) -> KindTable:
        """Returns the kinds and formats of these plugins and the installed ones. Raises
        PluginError."""
        from mmdeploy_llm.hooks import PluginManager
        from mmdeploy_llm.values.options.plugin_choice import PluginChoice

        return PluginManager.of(PluginChoice(**self.choice(chosen))).kinds
