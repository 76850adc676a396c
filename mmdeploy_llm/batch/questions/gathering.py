"""Gathering: the answers to the questions about an item become one record, once all are there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.records.making import record_of
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.records.several import joined, parsed
from mmdeploy_llm.engine.desk.ask import Ask

from .boxed import with_boxes

if TYPE_CHECKING:
    from mmdeploy_llm.engine.desk.outcome import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of the questions about an item."""

    item: Item
    name: str

    @property
    def id(self) -> str | int:
        """The item's."""
        return self.item.id


def asks_of(item: Item) -> Iterator[Ask]:
    """Yields what is asked about an item. Questions about one item are a group: its media are
    encoded once, and what the prompts have in common is computed once."""
    if not item.questions:
        yield Ask(prompt=item.prompt, params=item.params, item=item, wanted=item.wanted)
    for question in item.questions:
        part = Part(item=item, name=question.name)
        yield Ask(prompt=question.prompt, params=item.params, item=part, group=item.line)


def item_of(ask: Ask) -> Item:
    """Returns the item that an ask of `asks_of` is about."""
    found: Item | Part = ask.item
    return found.item if isinstance(found, Part) else found


class Gathering:
    """Collects answers; holds those of items that wait for others. Used by one thread.

    config_digest: of the configuration, for the records. is_json: whether answers are JSON, whose
        values the records have.
    """

    def __init__(self, config_digest: str = "", *, is_json: bool = False) -> None:
        self._config_digest, self._is_json = config_digest, is_json
        self._begun: dict[int, dict[str, Record]] = {}  # by the item's line: records by question

    def add(self, answer: Answer) -> Record | None:
        """Returns the record of the answer's item; None while other answers are to come."""
        item = item_of(answer.ask)
        record = with_boxes(
            record_of(item, answer.output, answer.error, self._config_digest), answer
        )
        if not isinstance(answer.ask.item, Part):
            return parsed(record) if self._is_json else record
        found = self._begun.setdefault(item.line, {})
        found[answer.ask.item.name] = record
        if len(found) < len(item.questions):
            return None
        del self._begun[item.line]
        records = {own.name: found[own.name] for own in item.questions}
        return joined(records, is_json=self._is_json)
