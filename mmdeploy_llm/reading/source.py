"""PageSource: the items of documents, one for each page."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from mmdeploy_llm.batch.file_source import FileSource
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
from .pages import FoundPages, PageFile, document_id


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
        whole = replace(found, files=pages.files)
        super().__init__(whole, params, selection, template_kwargs=template_kwargs)
        num = len({file.path for file in pages.files})
        documents_are = f"{num} document{'' if num == 1 else 's'}"
        told = f"{self.total} pages of {documents_are}; {asking.about}"
        self.about = "\n".join([*filter(None, [self.about]), told, *pages.notes])
        self.unit = "page"

    def use_root(self, root: str | None, known: Mapping[str, str] | None = None) -> None:
        """See FileSource. Outputs of an earlier version have no pages."""
        self.root = root
        ids = None if root is None else Ids(root)
        self._files: dict[str, FoundFile] = {}
        self.ids: dict[str, int] = {}
        self._paths: dict[str, str] = {}
        for line, file in enumerate(self._pages.files, 1):
            document = file.path if ids is None else ids.of(file.place)
            own = file.id_of(document)
            self.ids[own], self._paths[document] = line, file.path
            if self._selection.takes(line) and self._selection.takes_id(own, file.path):
                self._files[own] = file

    def file_of(self, record: Record) -> str | None:
        """Returns the path of the record's document; None when it is not in the list."""
        return None if record.path is None else self._paths.get(document_id(str(record.id)))

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
            size=self._sizes[file.path],
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
