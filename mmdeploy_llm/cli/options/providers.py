"""Options of which plugins serve a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from .groups import Group

if TYPE_CHECKING:
    from mmdeploy_llm.hooks import KindTable

Plugin = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        hidden=True,
        help="A Python file that is loaded as a plugin, besides those that are installed: its "
        "code runs. May be repeated.",
    ),
]
Use = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=PLUGIN",
        hidden=True,
        help="Which plugin serves what several could, by the name of an architecture, parser, "
        "kind of media or format, such as AcmeForCausalLM=acme. May be repeated.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderOptions(Group):
    """Which plugins serve a model."""

    title: ClassVar[str] = "Model"

    plugin: Plugin = None
    use: Use = None

    def to_engine(self) -> dict[str, Any]:
        """Returns the files of plugins, and which plugin serves what."""
        return {"plugin_files": self.plugin, "use": self.use}

    def choice(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what is given of these options and of `chosen`, which the environment says of
        plugins, see cli.plugin_names."""
        return {name: value for name, value in self.to_engine().items() if value} | dict(chosen)

    def kinds(self, chosen: Mapping[str, Any]) -> KindTable:
        """Returns the kinds and formats of these plugins and the installed ones. Raises
        PluginError."""
        from mmdeploy_llm.hooks import PluginManager
        from mmdeploy_llm.values.options.plugin_choice import PluginChoice

        return PluginManager.of(PluginChoice(**self.choice(chosen))).kinds
