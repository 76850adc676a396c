"""PageSource: the items of documents, one for each page."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from mmdeploy_llm.batch.file_source import Fate, FileSource
from mmdeploy_llm.batch.items import MAX_QUESTION, with_system
from mmdeploy_llm.datasets.names import is_url
from mmdeploy_llm.datasets.rows import BadItem
from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.finding.files import Found, FoundFile
from mmdeploy_llm.finding.identity import Ids
from mmdeploy_llm.params import SamplingParams
from mmdeploy_llm.records.identity import digest_of, file_state
from mmdeploy_llm.records.ids import Selection
from mmdeploy_llm.records.item import Item, Media
from mmdeploy_llm.records.record import Record

from .asking import Asking
from .opening import Documents, PageFacts
from .pages import FoundPages, PageFile, counted, document_id, page_of


class PageSource(FileSource):
    """Builds one item per page; see FileSource. documents: opens them, for prompts that say what is
    on a page."""

    def __init__(
        self,
        found: Found,
        pages: FoundPages,
        documents: Documents,
        asking: Asking,
        params: SamplingParams,
        selection: Selection,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._pages, self._documents, self._asking = pages, documents, asking
        self._all = found.files
        whole = replace(found, files=pages.files)
        super().__init__(whole, params, selection, template_kwargs=template_kwargs)
        told = f"{self._told()}; {asking.about}"
        self.about = "\n".join([*filter(None, [self.about]), told, *pages.notes])
        self.unit = "page"

    def _told(self) -> str:
        """Counts what is read: "3 pages of 2 documents, 1 of which cannot be opened"."""
        files = [file for file in self._files.values() if isinstance(file, PageFile)]
        unopened = sum(file.error is not None for file in files)
        pages, documents = len(files) - unopened, len({file.path for file in files})
        words = f"{counted(pages, 'page')} of {counted(documents, 'document')}"
        return f"{words}, {unopened} of which cannot be opened" if unopened else words

    def use_root(self, root: str | None, known: Mapping[str, str] | None = None) -> None:
        """See FileSource. Outputs of an earlier version have no pages. A shard has whole documents,
        so that it writes whole Markdown of them."""
        self.root = root
        ids = None if root is None else Ids(root)
        self._files: dict[str, FoundFile] = {}
        self.ids: dict[str, int] = {}
        own_ids = {
            file.path: file.path if ids is None else ids.of(file.place) for file in self._all
        }
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
        line = self.ids[own]
        try:
            if file.error is not None:
                raise file.error
            return self._page(own, file)
        except RequestError as error:
            return BadItem(
                line=line,
                id=own,
                path=file.path,
                message=str(error),
                kind=type(error).__name__,
                code=error.code,
            )

    def _page(self, own: str, file: PageFile) -> Item:
        text = self._asking.written(self._values(file))
        return Item(
            line=self.ids[own],
            id=own,
            path=file.path,
            prompt={
                "messages": self._messages(file, text),
                "chat_template_kwargs": dict(self._template_kwargs),
            },
            params=self._params,
            media=(_media(file),),
            question=text[:MAX_QUESTION] or None,
            digest=digest_of(file_state(file.path)),
            columns={
                "document": document_id(own),
                "page": file.number,
                "pages": file.num_pages,
            },
            size=self._size(file),
        )

    def _values(self, file: PageFile) -> dict[str, Any]:
        facts = PageFacts()
        if self._asking.has_facts and file.index is not None:
            facts = self._documents.facts(file.kind, file.path, file.index, self._asking.options)
        return {
            "page": file.number,
            "pages": file.num_pages,
            "text_layer": facts.text_layer,
            "width": facts.width,
            "height": facts.height,
        }

    def _messages(self, file: PageFile, text: str) -> Any:
        kind, path = file.kind, file.path
        path = os.path.abspath(path) if is_url(path) else path
        given: Any = path
        if file.index is not None:
            options = self._documents.options(kind, file.index, self._asking.options)
            given = {kind: path, **options}
        parts: list[dict[str, Any]] = [{"type": kind, kind: given}]
        parts += [{"type": "text", "text": text}] if text else []
        return with_system([{"role": "user", "content": parts}], self._asking.preset.system)


def _media(file: PageFile) -> Media:
    """Returns the page as the media of a record."""
    pages = None if file.index is None else str(file.number)
    return Media(kind=file.kind, name=os.path.abspath(file.path), pages=pages)
