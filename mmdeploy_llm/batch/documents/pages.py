"""PageFile: a page of a document, found as a file is; documents become their pages. TextLayers: the
text that documents themselves hold, for questions that name {text_layer}."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmdeploy_llm.data.files.files import FoundFile
from mmdeploy_llm.data.files.page_choice import PAGE_MARK
from mmdeploy_llm.errors import RequestError, UnsupportedMediaError
from mmdeploy_llm.media.documents.page_ranges import parse_pages

from .documents import Documents

logger = logging.getLogger(__name__)


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


MAX_TOLD = 20  # notes on documents


def counted(num: int, noun: str) -> str:
    """Returns a number with its noun: "1 page", "2 pages"."""
    return f"{num} {noun}" if num == 1 else f"{num} {noun}s"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPages:
    """The pages of an input. counts: the pages of every document that can be opened, by its path; 0
    for one that is a single item. notes: what was left out, in sentences."""

    files: Sequence[PageFile]
    counts: Mapping[str, int]
    notes: tuple[str, ...]


def find_pages(
    files: Sequence[FoundFile],
    documents: Documents,
    options: Mapping[str, Any],
    pages: str | None,
    kinds: Collection[str],
) -> FoundPages:
    """Opens every document and returns all pages. pages: those of each document, see parse_pages;
    what a document does not have of them is left out. kinds: of files that count as documents. A
    document that cannot be opened is one item, which fails. Raises MediaError for a text that names
    no pages."""
    if pages is not None:
        parse_pages(pages, 1, is_strict=False)
    found: list[PageFile] = []
    counts: dict[str, int] = {}
    without, whole, unread, told = 0, Counter[str](), dict[str, None](), list[str]()
    for file in files:
        try:
            is_paged = documents.is_paged(file.kind)
            count = documents.count(file.kind, file.path, options) if is_paged else 0
            own_notes = documents.notes(file.kind, file.path, options) if is_paged else ()
        except RequestError as error:
            found.append(PageFile(place=file.place, kind=file.kind, error=error))
            if isinstance(error, UnsupportedMediaError):  # a library is missing, for all of them
                unread[str(error)] = None
            continue
        counts[file.path] = count
        told += [f"{file.path}: {note}" for note in own_notes]
        whole[file.kind] += file.kind in documents.split_kinds and not is_paged
        own = list(_pages_of(file, count, pages if file.kind in kinds else None))
        without += not own
        found += own
    notes = []
    if without:
        words = "document has" if without == 1 else "documents have"
        notes.append(f"{without} {words} none of the pages {pages}")
    notes += unread
    notes += told[:MAX_TOLD]
    if len(told) > MAX_TOLD:
        notes.append(f"and {len(told) - MAX_TOLD} more notes on documents")
    notes += [
        f"{num} {kind} asked about whole: its plugin has no option that chooses a part"
        for kind, num in whole.items()
        if num
    ]
    return FoundPages(files=found, counts=counts, notes=tuple(notes))


def _pages_of(file: FoundFile, count: int, pages: str | None) -> Iterator[PageFile]:
    """Yields the wanted pages of a document. count: see FoundPages."""
    num_pages = count or 1
    wanted = range(num_pages) if pages is None else parse_pages(pages, num_pages, is_strict=False)
    for index in wanted:
        own = index if count else None
        yield PageFile(place=file.place, kind=file.kind, index=own, num_pages=num_pages)


MAX_TEXT = 16_384  # characters of a whole document in a question


class TextLayers:
    """The texts of pages, and of whole documents up to MAX_TEXT characters. Says once that a text
    is empty, and once that one was cut. open_documents: called for the first text. options: of
    documents."""

    def __init__(self, open_documents: Callable[[], Documents], options: Mapping[str, Any]) -> None:
        self._open, self._options = open_documents, options
        self._told: set[str] = set()

    def of(self, file: FoundFile) -> str:
        """Returns the text of a page or a file. Raises MediaError and its subclasses."""
        documents = self._open()
        if isinstance(file, PageFile) and file.index is not None:
            name = file.id_of(file.path)
            text = documents.text(file.kind, file.path, file.index, self._options)
        else:
            name = file.path
            text = documents.whole_text(file.kind, file.path, self._options, MAX_TEXT)
            if len(text) > MAX_TEXT:
                text = text[:MAX_TEXT]
                words = f"has more text than {MAX_TEXT} characters: {{text_layer}} is its beginning"
                self._tell(name, f"{words}; ask about pages to have all of it")
        if not text.strip():
            self._tell(name, "has no text of its own: {text_layer} is empty")
        return text

    def _tell(self, name: str, words: str) -> None:
        if words not in self._told:
            self._told.add(words)
            logger.warning("%s %s (said once; others may be alike)", name, words)
