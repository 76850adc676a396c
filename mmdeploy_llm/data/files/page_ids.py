"""The ids of pages: report.pdf#page=3 is the third page of the document report.pdf."""

from __future__ import annotations

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
