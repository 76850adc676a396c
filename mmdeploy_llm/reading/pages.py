"""PageFile: a page of a document, found as a file is; documents become their pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.finding.files import FoundFile
from mmdeploy_llm.page_ranges import parse_pages

from .opening import Documents

PAGE_MARK = "#page="


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFile(FoundFile):
    """A page of a document, or a picture, which is one page.

    index: of the page, from 0; None where the document is one item. num_pages: of the document.
    error: why the document cannot be opened.
    """

    index: int | None = None
    num_pages: int = 1
    error: RequestError | None = None

    @property
    def number(self) -> int:
        """The number of the page, from 1."""
        return 1 if self.index is None else self.index + 1

    def id_of(self, document: str) -> str:
        """Returns the id of the page from that of its document."""
        return document if self.index is None else f"{document}{PAGE_MARK}{self.index + 1}"


def document_id(own: str) -> str:
    """Returns the id of the document that a page with this id is of."""
    document, mark, number = own.rpartition(PAGE_MARK)
    return document if mark and number.isdigit() else own


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPages:
    """The pages of an input. notes: what was left out, in sentences."""

    files: Sequence[PageFile]
    notes: tuple[str, ...]


def find_pages(
    files: Sequence[FoundFile],
    documents: Documents,
    options: Mapping[str, Any],
    pages: str | None,
) -> FoundPages:
    """Opens every document and returns all pages. pages: those of each document, see parse_pages;
    what a document does not have of them is left out. A document that cannot be opened is one item,
    which fails. Raises MediaError for a text that names no pages."""
    if pages is not None:
        parse_pages(pages, 1, is_strict=False)
    found: list[PageFile] = []
    without = 0
    for file in files:
        own = list(_pages_of(file, documents, options, pages))
        without += not own
        found += own
    notes = []
    if without:
        words = "document has" if without == 1 else "documents have"
        notes.append(f"{without} {words} none of the pages {pages}")
    return FoundPages(files=found, notes=tuple(notes))


def _pages_of(
    file: FoundFile, documents: Documents, options: Mapping[str, Any], pages: str | None
) -> Iterator[PageFile]:
    if not documents.is_paged(file.kind):
        wanted = (0,) if pages is None else parse_pages(pages, 1, is_strict=False)
        if wanted:
            yield PageFile(place=file.place, kind=file.kind)
        return
    try:
        count = documents.count(file.kind, file.path, options)
    except RequestError as error:
        yield PageFile(place=file.place, kind=file.kind, error=error)
        return
    wanted = tuple(range(count)) if pages is None else parse_pages(pages, count, is_strict=False)
    for index in wanted:
        yield PageFile(place=file.place, kind=file.kind, index=index, num_pages=count)
