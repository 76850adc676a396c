"""Sources: builds the source of files for a batch, page by page where that is wanted."""

from __future__ import annotations

from typing import Any

from mmdeploy_llm.batch.file_source import FileSource
from mmdeploy_llm.data.files.files import Found
from mmdeploy_llm.data.files.page_choice import PageChoice
from mmdeploy_llm.data.records.ids import Selection
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.values.closing import Closing
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.weights.folder import PROMPT_FILES

from .documents import Documents
from .pages import TextLayers, find_pages
from .source import PageSource


class Sources(Closing):
    """Builds sources of files, and holds what opens their documents. The files of the model are
    read when the first document is opened."""

    def __init__(self, config: EngineConfig, choice: PageChoice) -> None:
        self._config, self._choice = config, choice
        self._documents: Documents | None = None

    def open(
        self, found: Found, params: SamplingParams, selection: Selection, **asked: Any
    ) -> FileSource:
        """Returns the source of these files, as FileSource is built. Raises ConfigError where no
        document has one of the pages that are wanted."""
        choice = self._choice
        if not choice.by_page:
            texts = TextLayers(self._opened, {})
            return FileSource(found, params, selection, text_of=texts.of, **asked)
        documents = self._opened()
        kinds = documents.split_kinds
        pages = find_pages(found.files, documents, choice.options, choice.pages, kinds)
        if not pages.files:
            raise ConfigError("; ".join(pages.notes) or "the documents have no pages")
        return PageSource(
            found,
            params,
            selection,
            pages=pages,
            documents=documents,
            options=choice.options,
            kinds=kinds,
            text_of=TextLayers(self._opened, choice.options).of,
            **asked,
        )

    def close(self) -> None:
        """Ends what opens documents."""
        if self._documents is not None:
            self._documents.close()

    def _opened(self) -> Documents:
        from mmdeploy_llm.engine.startup.media import kinds_of  # which imports torch
        from mmdeploy_llm.engine.startup.model_files import read_model_files

        if self._documents is None:
            files = read_model_files(self._config, PROMPT_FILES)
            self._documents = Documents.of(files, self._config, kinds_of(files))
        return self._documents
