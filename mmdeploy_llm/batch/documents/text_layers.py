"""TextLayers: the text that documents themselves hold, for questions that name {text_layer}."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from mmdeploy_llm.data.files.files import FoundFile

from .documents import Documents
from .pages import PageFile

MAX_TEXT = 16_384  # characters of a whole document in a question

logger = logging.getLogger(__name__)


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
