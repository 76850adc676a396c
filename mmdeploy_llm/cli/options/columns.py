"""Options of `batch` that name columns of a corpus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from mmdeploy_llm.batch.corpus.arguments import ColumnArguments
from mmdeploy_llm.errors import ConfigError

from .groups import Given, Group, Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnChoices(Group):
    """Options of `batch` that name columns of a corpus."""

    title: ClassVar[str] = "Columns of a corpus"

    named: Annotated[Given, Rows(ColumnArguments)]

    def to_batch(self) -> dict[str, Any]:
        """Returns the columns. Raises ConfigError."""
        media: dict[str, list[str]] = {}
        for text in self.named.get("media_column", ()):
            kind, name = _kind_and_name(text)
            media.setdefault(kind, []).append(name)
        carried = [name.strip() for name in self.named.get("columns", "").split(",")]
        found = {"media_column": media, "columns": [name for name in carried if name]}
        return {**self.named, **found}


def _kind_and_name(text: str) -> tuple[str, str]:
    """Reads KIND=NAME. Raises ConfigError for another text."""
    kind, separator, name = text.partition("=")
    if not (separator and kind and name):
        raise ConfigError(f"--media-column {text!r} must be KIND=NAME, such as audio=sound")
    return kind, name
