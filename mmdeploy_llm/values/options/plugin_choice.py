"""PluginChoice: the options of an engine that say which plugins it has, and which of them serve."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from mmdeploy_llm.values.params import FrozenParams

from .flags import Flag
from .types import Choices, Names, NamesOrFiles


class PluginChoice(FrozenParams):
    """The plugins of an engine."""

    title: ClassVar[str] = "Model"

    plugins: NamesOrFiles | None = Field(
        default=None,
        description="names of the only plugins to load; None: all that are installed. A path of a "
        "Python file among them is one of plugin_files; paths alone leave it None",
    )
    plugin_files: Annotated[
        NamesOrFiles,
        Flag(
            "A Python file that is loaded as a plugin, besides those that are installed: its code "
            "runs. May be repeated.",
            metavar="FILE",
            is_rare=True,
            names=("--plugin",),
            type=list[Path],
            is_file=True,
        ),
    ] = Field(
        default=(),
        description="paths of Python files, each a plugin, that are loaded besides those of "
        "plugins: their code runs, as that of a package",
    )
    blocked_plugins: Names = Field(default=(), description="names of plugins that are not loaded")
    use: Annotated[
        Choices,
        Flag(
            "Which plugin serves what several could, by the name of an architecture, parser, kind "
            "of media or format, such as AcmeForCausalLM=acme. May be repeated.",
            metavar="NAME=PLUGIN",
            is_rare=True,
            type=list[str],
        ),
    ] = Field(
        default={},
        description='which plugin serves what several could, such as {"AcmeForCausalLM": "acme"}: '
        "an architecture, parser, logits processor, kind of media or format",
    )

    @model_validator(mode="before")
    @classmethod
    def _find_files(cls, values: Any) -> Any:
        """Makes paths absolute: other processes may work in other folders."""
        if not isinstance(values, Mapping):
            return values
        named, given = values.get("plugins"), values.get("plugin_files")
        names, files = _listed(named), _listed(given)
        if names is None or files is None:
            return values  # of a wrong type, which is told by the fields
        paths = dict.fromkeys(map(_absolute, (*files, *filter(is_path, names))))
        if not paths:
            return values
        names = [name for name in names if not is_path(name)]
        own = {"plugins": names if names or named in ((), []) else None}
        return {**values, **own, "plugin_files": tuple(paths)}


def is_path(name: object) -> bool:
    """Whether a plugin is named by the path of its file."""
    return isinstance(name, Path) or (
        isinstance(name, str) and (name.endswith(".py") or os.sep in name)
    )


def _listed(value: Any) -> list[Any] | None:
    """Returns the entries of an option, [] of None; None for a value of a wrong type."""
    if value is None:
        return []
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, Iterable) and not isinstance(value, bytes | Mapping):
        found = list(value)
        return found if all(isinstance(each, str | Path) for each in found) else None
    return None


def _absolute(path: str | Path) -> str:
    return os.path.abspath(os.path.expanduser(path))
