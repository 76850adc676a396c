"""Finds the tables by which GGUF files are read: plugins name them in `ModelSpec.gguf`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TypeVar

from mmdeploy_llm.errors import (
    CheckpointError,
    ModelNotSupportedError,
    PluginError,
)
from mmdeploy_llm.hooks import PluginManager

from .header import Header
from .tables import GGUFTable, MediaModel, TextModel, Tower

TOWER = "clip"  # general.architecture of a file with a vision tower
T = TypeVar("T")


class Tables:
    """Some tables, the first of which that has an architecture or a tower decides."""

    def __init__(self, tables: Sequence[GGUFTable], note: str = "") -> None:
        """note: the end of the error message for an architecture that no table has."""
        self._tables = tuple(tables)
        self._note = note

    @classmethod
    def named(cls, names: Sequence[str]) -> Tables:
        """Imports tables by "module:TABLE", which `find_tables` returned."""
        return cls([_imported(name) for name in names])

    def model(self, text: Header) -> TextModel:
        """Returns the text model of an architecture. Raises ModelNotSupportedError for one that is
        not known."""
        if text.architecture == TOWER:
            raise ModelNotSupportedError(
                "a GGUF file with a vision tower holds no text model; name the file of the text "
                "model that lies beside it"
            )
        known = _merged(self._tables, lambda table: table.models)
        if text.architecture not in known:
            raise ModelNotSupportedError(
                f"a GGUF file of the architecture {text.architecture[:60]!r} cannot be read; "
                f"known: {', '.join(sorted(known))}. Use the model's safetensors files, or "
                f"install a plugin with a GGUF table of it{self._note}"
            )
        return known[text.architecture]

    def tower(self, header: Header) -> Tower:
        """Returns the tower of an mmproj file. Raises CheckpointError for a file that is none, and
        for a tower that is not known."""
        path, known = header.paths[0], _merged(self._tables, lambda table: table.towers)
        if header.architecture != TOWER:
            raise CheckpointError(
                f"{path} is named as a vision tower, but its general.architecture is "
                f"{header.architecture[:60]!r}, not {TOWER!r}; rename it"
            )
        kind = _kind(header)
        if kind not in known:
            raise CheckpointError(
                f"the vision tower in {path} is of the kind {kind[:60]!r}, which cannot be read; "
                f"known: {', '.join(sorted(known))}. Use the model's safetensors files, or move "
                f"the file elsewhere to load the model without images{self._note}"
            )
        return known[kind]

    def media_model(self, text: Header, tower: Header) -> MediaModel:
        """Returns what a text model and a vision tower are together. Raises CheckpointError when
        they do not belong together, and as `tower`."""
        models = self.tower(tower).models
        if text.architecture not in models:
            raise CheckpointError(
                f"the vision tower in {tower.paths[0]} belongs to a text model of the architecture "
                f"{' or '.join(models)}, but {text.paths[0].name} is of "
                f"{text.architecture[:60]!r}; put each model and its mmproj file into a folder of "
                "their own"
            )
        return models[text.architecture]


def find_tables(
    plugins: PluginManager, text: Header, tower: Header | None
) -> tuple[tuple[str, ...], Tables]:
    """Returns the names of the tables that the files of a model need, and these tables.

    Of several plugins with a table of the same architecture or tower the highest priority decides.
    Raises PluginConflictError on a tie. A table that cannot be imported is named in the error of
    whoever misses it.
    """
    tables: dict[str, GGUFTable] = {}
    failures: list[str] = []
    specs = {spec.gguf: spec for spec in plugins.models if spec.gguf is not None}
    for name, spec in specs.items():
        try:
            tables[name] = plugins.gguf_table(spec, GGUFTable)
        except PluginError as error:
            failures.append(str(error))
    note = "".join(f"\n - {failure}" for failure in failures)

    def best(kind: str, value: str, part: Callable[[GGUFTable], Container[str]]) -> str | None:
        found = [specs[name] for name, table in tables.items() if value in part(table)]
        wanted = f"the {kind} {value!r}"[:80] + " of GGUF files"
        return plugins.preferred(found, wanted, key).gguf if found else None

    known = [
        table.models[text.architecture].model
        for table in tables.values()
        if text.architecture in table.models
    ]
    key = next(iter(known), text.architecture)  # the class, by which `use` chooses
    wanted = [best("architecture", text.architecture, lambda table: table.models)]
    if tower is not None:
        wanted.append(best("vision tower", _kind(tower), lambda table: table.towers))
    names = tuple(dict.fromkeys(name for name in wanted if name is not None))
    ordered = dict.fromkeys([*names, *tables])
    return names, Tables([tables[name] for name in ordered], note)


def _merged(
    tables: Sequence[GGUFTable], part: Callable[[GGUFTable], Mapping[str, T]]
) -> Mapping[str, T]:
    """Returns one part of all tables; that of an earlier table wins."""
    found: dict[str, T] = {}
    for table in tables:
        found = {**part(table), **found}
    return found


def _kind(tower: Header) -> str:
    values = tower.values
    return str(values.get("clip.vision.projector_type", values.get("clip.projector_type")))


def _imported(name: str) -> GGUFTable:
    module, _, attribute = name.partition(":")
    table: GGUFTable = getattr(importlib.import_module(module), attribute)
    return table
