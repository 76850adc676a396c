"""Origin: of which model vectors are, and how they were made, as the configurations of an output
say; a query must be of the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.values.pooling_request import PoolingRequest

from .opened import Vectors

PREFIX = "vectors."
MADE = ("what", "pooling", "normalize", "dimensions")  # what a query has in common with the items
MAX_SHOWN = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """How vectors were made. model: the name of the model. values: the configuration: of the
    engine, and how vectors are made, with PREFIX."""

    model: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def query(self, instruction: str | None = None) -> PoolingRequest:
        """Returns what is asked for the vector of a query."""
        made: dict[str, Any] = {name: self.values.get(f"{PREFIX}{name}") for name in MADE}
        if made["what"] == "vector" and made["pooling"] is None:
            made["what"] = None  # as the model's folder says
        return PoolingRequest(**made, instruction=instruction)

    def check(self, values: Mapping[str, Any]) -> None:
        """Raises ConfigError for an engine, by its configuration's values, of another model."""
        if self.values.get("model") != values.get("model"):
            raise ConfigError(
                f"the vectors are of {self.model[:MAX_SHOWN]!r} as its files were then, and those "
                "of this model differ: name the model that made them with --model, or embed the "
                "items again"
            )


def origin_of(vectors: Vectors) -> Origin:
    """Returns how vectors were made. Raises ConfigError where nothing says it, or where they were
    made in several ways."""
    found: dict[tuple[str, ...], Origin] = {}
    for entry in vectors.configurations.values():
        values = entry["values"]
        made = ("model", *(f"{PREFIX}{name}" for name in MADE))
        key = tuple(repr(values.get(name)) for name in made)
        found[key] = Origin(model=str(entry.get("model")), values=values)
    if not found:
        raise ConfigError(
            f"nothing says of which model the vectors of {vectors.name!r} are: they are no output "
            "of `embed`, or its OUTPUT.config.json is missing; name the model with --model"
        )
    if len(found) > 1:
        names = ", ".join(sorted({own.model for own in found.values()}))
        raise ConfigError(
            f"the vectors of {vectors.name!r} were made in {len(found)} ways ({names}), and cannot "
            "be compared with one query; embed the items again"
        )
    return next(iter(found.values()))
