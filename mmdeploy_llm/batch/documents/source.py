"""PageSource: the items of files, one for each page of a document."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from mmdeploy_llm.batch.file_source import Fate, FileSource
from mmdeploy_llm.batch.items import MAX_QUESTION
from mmdeploy_llm.data.files.files import Found, FoundFile
from mmdeploy_llm.data.files.page_choice import document_id, page_of
from mmdeploy_llm.data.files.question_fields import OF_PAGES, SIDECAR
from mmdeploy_llm.data.files.walk import Ids
from mmdeploy_llm.data.outputs.sidecars.places import Spot
from mmdeploy_llm.data.records.ids import Selection
from mmdeploy_llm.data.records.item import Item, Media
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.values.params import SamplingParams

from .documents import TURN, Documents
from .pages import FoundPages, PageFile, counted

if TYPE_CHECKING:
    from mmdeploy_llm.media.documents.upright import UprightFinder

SIZES = {"width", "height"}  # names for which a page is opened
LOOKED_AT = 512  # pixels of a page's shorter side, from which its direction is found
TURNED, NOTES = "turned", "notes"  # columns of a record: degrees clockwise; what is told of it


class PageSource(FileSource):
    """Builds one item per page, and one per file that has no pages; see FileSource.

    documents: opens them. options: of documents. kinds: of files that count as documents. more:
    told after the number of pages. finder: finds how pages must be turned; None: none is.
    """

    names: ClassVar[tuple[str, ...]] = (SIDECAR, *OF_PAGES)

    def __init__(
        self,
        found: Found,
        params: SamplingParams,
        selection: Selection,
        *,
        pages: FoundPages,
        documents: Documents,
        options: Mapping[str, Any],
        kinds: Collection[str],
        more: str = "",
        finder: UprightFinder | None = None,
        **asked: Any,
    ) -> None:
        self._pages, self._documents, self._options = pages, documents, options
        self._all = found.files
        self._finder, self._turned = finder, dict[PageFile, int | None]()
        super().__init__(replace(found, files=pages.files), params, selection, **asked)
        files = [file for file in self._files.values() if isinstance(file, PageFile)]
        paged = [file for file in files if file.kind in kinds]
        told = "; ".join(filter(None, [self._told(files, paged), more]))
        self.about = "\n".join([*filter(None, [self.about]), told, *pages.notes])
        self.unit = "page" if paged else self.unit

    def _told(self, files: Sequence[PageFile], paged: Sequence[PageFile]) -> str:
        """Counts what is read: "3 pages of 2 documents, 1 of which cannot be opened, and 4 other
        files"."""
        unopened = sum(file.error is not None for file in paged)
        documents = counted(len({file.path for file in paged}), "document")
        words = f"{counted(len(paged) - unopened, 'page')} of {documents}"
        words += f", {unopened} of which cannot be opened" if unopened else ""
        others = len(files) - len(paged)
        if not paged:
            return f"no documents, {counted(others, 'other file')}"
        return f"{words}, and {counted(others, 'other file')}" if others else words

    def use_root(self, root: str) -> None:
        """See FileSource. A shard has whole documents, so that it writes whole Markdown of them."""
        self.root, ids = root, Ids(root)
        self._files: dict[str, FoundFile] = {}
        self.ids: dict[str, int] = {}
        own_ids = {file.path: ids.of(file.place) for file in self._all}
        # Documents by their ids: the place in the list, and the path.
        self._known = {own_ids[file.path]: (at, file.path) for at, file in enumerate(self._all)}
        self._paged: set[str] = set()  # ids of the documents whose pages this run reads
        chosen = self._selection
        lines = replace(chosen, shard=1, num_shards=1)
        for line, file in enumerate(self._pages.files, 1):
            document = own_ids[file.path]
            own = file.id_of(document)
            self.ids[own] = line
            is_ours = (self._known[document][0] + 1 - chosen.shard) % chosen.num_shards == 0
            if is_ours and lines.takes(line) and lines.takes_id(own, file.path):
                self._files[own] = file
                if own != document:
                    self._paged.add(document)

    def sizes(self) -> Mapping[int, int]:
        """Returns the bytes of every page by its line: its share of the document's."""
        return {self.ids[own]: self._size(file) for own, file in self._files.items()}

    def _size(self, file: FoundFile) -> int:
        assert isinstance(file, PageFile)
        return max(1, self._sizes[file.path] // file.num_pages)

    def place_of(self, record: Record) -> int | None:
        """Returns the position of the record's page in the list; None when not selected."""
        own = str(record.id)
        return self.ids[own] if record.path is not None and own in self._files else None

    def fate_of(self, record: Record) -> Fate:
        """See FileSource. A record of a whole document is replaced where this run reads its pages;
        one of a page is past where the document has fewer pages now."""
        own, document = str(record.id), document_id(str(record.id))
        if record.path is None or own in self.ids or document not in self._known:
            return "kept"
        count = self._pages.counts.get(self._known[document][1])
        if count is None:  # it cannot be opened, so nobody knows
            return "kept"
        if own == document:
            return "replaced" if own in self._paged else "kept"
        return "past" if page_of(own) > count else "kept"

    def rank_of(self, record: Record) -> tuple[int, int] | None:
        """Returns where a record of any run belongs in the Markdown: the place of its document in
        the list, and its page. None for what is no part of these documents any more."""
        own = str(record.id)
        at, _ = self._known.get(document_id(own), (None, ""))
        if at is None or record.path is None or self.fate_of(record) != "kept":
            return None
        return at, 0 if own == document_id(own) else page_of(own)

    def unlisted(self, ids: Iterable[str]) -> set[str]:
        """Returns the ids of documents of which records had these ids, and which are not in the
        list."""
        return {document_id(own) for own in ids} - self._known.keys()

    def file_of(self, record: Record) -> str | None:
        """Returns the path of the record's document; None when it is not in the list."""
        known = self._known.get(document_id(str(record.id)))
        return None if record.path is None or known is None else known[1]

    def file_id(self, own: str) -> str:
        """Returns the id of the document that a page is of."""
        return document_id(own)

    def _ordered(self) -> Iterable[str]:
        return self._files  # a document is done before the next begins

    def _item(self, own: str) -> Item | BadItem:
        file = self._files[own]
        assert isinstance(file, PageFile)
        if file.error is None:
            return super()._item(own)
        error = file.error
        return BadItem(
            line=self.ids[own],
            id=own,
            path=file.path,
            message=str(error),
            kind=type(error).__name__,
            code=error.code,
        )

    def _good(self, own: str, file: FoundFile) -> Item:
        assert isinstance(file, PageFile)
        told = self._told_turn(file)
        item = super()._good(own, file)
        text = item.prompt.messages[-1].text if item.prompt.messages else ""
        return replace(
            item,
            media=(_media(file),),
            question=text[:MAX_QUESTION] or None,
            columns={
                "document": document_id(own),
                "page": file.number,
                "pages": file.num_pages,
                **told,
            },
            size=self._size(file),
        )

    def _plain(self, file: FoundFile) -> str:
        if self._question is not None:
            return self._question
        assert isinstance(file, PageFile)
        is_page = file.index is not None
        return self._asks.described(self._documents.part_name(file.kind) if is_page else file.kind)

    def _given(self, file: FoundFile) -> Any:
        assert isinstance(file, PageFile)
        path, turn = super()._given(file), self._turn_of(file)
        if file.index is None:
            if not turn:
                return path
            from mmdeploy_llm.media.documents.upright import turned_file  # which imports Pillow

            return turned_file(self._documents.picture(file.kind, file.path, None, {}), turn)
        options = {**self._options, TURN: turn} if turn else self._options
        return {file.kind: path, **self._documents.options(file.kind, file.index, options)}

    def _turn_of(self, file: PageFile) -> int | None:
        """Returns the degrees clockwise that make a page upright, None where they are not known."""
        if self._finder is None or not self._documents.can_turn(file.kind):
            return None
        if file not in self._turned:
            own = (file.kind, file.path, file.index, self._options)
            try:
                turn = self._finder.turn_of(self._documents.picture(*own, LOOKED_AT))
            except RequestError:  # the page's own error comes when it is read
                turn = None
            self._turned = {file: turn}  # one at a time: they are asked for in order
        return self._turned[file]

    def _told_turn(self, file: PageFile) -> dict[str, Any]:
        """Returns the columns that say how a page was turned."""
        if self._finder is None:
            return {}
        turn = self._turn_of(file)
        if turn == 0:
            return {TURNED: 0}
        unknown = "it is not known whether the page is upright: it stays as it is"
        note = f"turned by {turn} degrees clockwise to be upright" if turn else unknown
        return {TURNED: turn, NOTES: note}

    def _values(self, file: FoundFile) -> dict[str, Any]:
        assert isinstance(file, PageFile)
        found = {"page": file.number, "pages": file.num_pages, "width": 0, "height": 0}
        if self._named & SIZES and file.index is not None:
            of_page = (file.kind, file.path, file.index, self._options)
            found["width"], found["height"] = self._documents.size(*of_page)
        return {**found, **super()._values(file)}

    def _spot(self, file: FoundFile) -> Spot:
        assert isinstance(file, PageFile)
        page = None if file.index is None else file.number
        return replace(super()._spot(file), page=page)


def _media(file: PageFile) -> Media:
    """Returns the page as the media of a record."""
    pages = None if file.index is None else str(file.number)
    return Media(kind=file.kind, name=os.path.abspath(file.path), pages=pages)
