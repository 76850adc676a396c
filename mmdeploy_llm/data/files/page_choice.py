"""PageChoice: whether each page of a document is an item of its own, and how pages are drawn. The
id of such an item is report.pdf#page=3, of the third page of report.pdf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmdeploy_llm.errors import ConfigError, MediaError
from mmdeploy_llm.media.documents.page_ranges import parse_pages

from .arguments import DPI

PAGE_COLUMNS = ("document", "page", "pages")  # of the record of a page


@dataclass(frozen=True, slots=True, kw_only=True)
class PageChoice:
    """Says whether pages are items; options: of documents, such as dpi and password."""

    by_page: bool = False
    pages: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def taken(cls, values: dict[str, Any]) -> PageChoice:
        """Takes the choice from arguments. Raises ConfigError for wrong ones."""
        by_page, pages = values.pop("by_page", False), values.pop("pages", None)
        given = {name: values.pop(name, None) for name in ("dpi", "password")}
        options = {name: value for name, value in given.items() if value is not None}
        if not by_page and (names := [*options, *([] if pages is None else ["pages"])]):
            raise ConfigError(f"{names[0]} needs by_page, which makes an item of each page")
        check_drawing(pages, options)
        return cls(by_page=by_page, pages=pages, options=options)

    def values(self) -> dict[str, Any]:
        """Returns what decides answers; no password."""
        own = ((name, value) for name, value in self.options.items() if name != "password")
        return {f"pages.{name}": value for name, value in own}


def check_drawing(pages: str | None, options: Mapping[str, Any]) -> None:
    """Raises ConfigError for pages that are no ranges, and for values that documents do not
    take."""
    dpi, (low, high) = options.get("dpi"), DPI
    if dpi is not None and not (isinstance(dpi, (int, float)) and low <= dpi <= high):
        raise ConfigError(f"dpi must be a number from {low} to {high}, got {dpi!r}")
    try:
        if pages is not None:
            parse_pages(pages, 1, is_strict=False)
    except MediaError as error:
        raise ConfigError(str(error)) from None


PAGE_MARK = "#page="


def document_id(own: str) -> str:
    """Returns the id of the document that a page with this id is of."""
    document, mark, number = own.rpartition(PAGE_MARK)
    is_page = mark and number.isascii() and number.isdigit() and len(number) < 10
    return document if is_page else own


def page_of(own: str) -> int:
    """Returns the number of the page with this id, 1 for a whole document."""
    document = document_id(own)
    return 1 if own == document else int(own[len(document) + len(PAGE_MARK) :])
