"""Options of which files of a folder are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from mmdeploy_llm.data.files.arguments import PageArguments

from .groups import Given, Group, Rows
from .values import text_value


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedPages(Group):
    """Whether pages of documents are items of their own, and how they are drawn."""

    title: ClassVar[str] = "Input"

    chosen: Annotated[Given, Rows(PageArguments, "by_page", "pages", "dpi", "password")]

    def to_batch(self) -> dict[str, Any]:
        """Returns the choice, with a password that a file has."""
        return with_text(self.chosen, "password")


def with_text(given: Given, *names: str) -> dict[str, Any]:
    """Returns options in which these texts are read, see text_value."""
    texts = {
        name: text_value(f"--{name}", given[name]) for name in names if given.get(name) is not None
    }
    return {**given, **texts}
