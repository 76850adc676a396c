"""Makes Markdown of the answer for a page, in its record."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mmdeploy_llm.batch.documents.source import NOTES
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.hooks import ReadPage, ReadText

from .asking import Asking
from .markup.tables import tables_as

ANSWER = "answer"  # column of a record: the answer as it was


class Finishing:
    """Replaces the text of records by Markdown. Thread-safe.

    A record whose answer became another text has the answer too, as the column "answer"; what there
    is to tell stands in the column "notes". counts: notes of this run, by their first words.
    """

    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        self._lock = threading.Lock()
        self.counts = Counter[str]()

    def __call__(self, record: Record, item: Item | BadItem) -> Record:
        """Returns the record of a page with Markdown as its text."""
        columns: dict[str, Any] = dict(record.columns)
        given = (columns[NOTES],) if NOTES in columns else ()
        if not record.is_ok or not record.text:
            self._count(given)
            return record
        found = self._converted(record.text)
        notes = (*given, *found.notes)
        if notes:
            columns[NOTES] = "; ".join(notes)
            self._count(notes)
        if found.text != record.text:
            columns[ANSWER] = record.text
        return replace(record, text=found.text, columns=columns)

    def _count(self, notes: Sequence[str]) -> None:
        with self._lock:
            self.counts.update(note.partition(":")[0] for note in notes)

    def _converted(self, answer: str) -> ReadText:
        how = self._asking.tables
        page = ReadPage(task=self._asking.task, tables=how or "html")
        try:
            made = self._asking.convert(answer, page)
        except ValueError as error:
            return ReadText(text=answer, notes=(f"the answer stays as it was: {error}",))
        except Exception as error:  # the plugin boundary
            name = type(error).__name__
            return ReadText(text=answer, notes=(f"the answer stays as it was: {name}",))
        found = made if isinstance(made, ReadText) else ReadText(text=made)
        if how is None:
            return found
        text, notes = tables_as(found.text, how)
        return ReadText(text=text, notes=(*found.notes, *notes))
