"""Edits: texts that a person has corrected on the page of a report, in the file that it saves.

A line for each: {"id": ..., "line": ..., "text": "as corrected", "edited_from": "as answered"}.
They are named beside the outputs that they belong to and replace the texts there while these are
read; no run writes or removes such a file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any

from mmdeploy_llm.data.records.files import open_regular
from mmdeploy_llm.data.records.outcome import Outcome
from mmdeploy_llm.data.records.record import Record, key_of
from mmdeploy_llm.errors import ConfigError

from .choose import is_remote

SUFFIX = ".edited.jsonl"
MARK = "edited_from"
MAX_LINE_BYTES = 2**24
MOST_NAMED = 3  # items in a note


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A corrected text. before: the answer that was corrected."""

    text: str
    before: str


class Edits:
    """The edits of some files by the keys of the records; of two of a record the later one counts.

    An edit whose answer is another one by now is taken all the same, and told. Failed items and
    those with several answers have no text that an edit replaces.
    """

    def __init__(self, names: Iterable[str]) -> None:
        """Raises ConfigError for a line that is no edit."""
        self.names = tuple(names)
        self._edits: dict[str, Edit] = {}
        self._met: dict[str, bool] = {}
        self._refused: dict[str, None] = {}
        self._num_again = 0
        for name in self.names:
            for key, edit in _read(name):
                self._add(key, edit)

    def applied(self, record: Record) -> Record:
        """Returns the record with its text as corrected, which has no outcome but ok then."""
        edit = self._edits.get(record.key)
        if edit is None:
            return record
        if not record.has_one_text:
            self._refused[record.key] = None
            return record
        self._met[record.key] = edit.before.split() != record.text.split()
        outcome: Outcome = "ok" if edit.text.strip() else "empty"
        return replace(record, text=edit.text, outcome=outcome, outcome_reason=None)

    def notes(self) -> list[str]:
        """Returns what a reader should know of them, once all records were met."""
        num = len(self._met)
        words = f"{num} {'text is' if num == 1 else 'texts are'} as edited in "
        words += ", ".join(self.names)
        found = {
            "of an answer that is another one by now": [k for k, new in self._met.items() if new],
            "left out, of an item that failed or has several answers": self._refused,
            "left out, of an item that no output has": self._edits.keys()
            - self._met.keys()
            - self._refused.keys(),
        }
        lines = [f"  {len(own)} {what}: {_some(own)}" for what, own in found.items() if own]
        if self._num_again:
            lines.append(f"  {self._num_again} replaced by a later line of the same item")
        return [words, *lines] if self.names else []

    def _add(self, key: str, edit: Edit) -> None:
        """Adds an edit; one that corrects an earlier one keeps the answer that this corrected."""
        earlier = self._edits.get(key)
        if earlier is not None:
            self._num_again += 1
            if edit.before.split() == earlier.text.split():
                edit = replace(edit, before=earlier.before)
        self._edits[key] = edit


def parted(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the names of outputs, and those of files of edits among them, which their first line
    tells."""
    edits = [name for name in names if _is_edits(name)]
    return [name for name in names if name not in edits], edits


def unnamed(outputs: Iterable[str], edits: Iterable[str]) -> list[str]:
    """Returns a note for each file of edits beside an output that was not named with it."""
    known = {os.path.realpath(name) for name in edits}
    beside = (str(Path(name).with_suffix(SUFFIX)) for name in outputs if not is_remote(name))
    return [
        f"{name} lies beside its output and was not named: its edits are left out"
        for name in beside
        if os.path.isfile(name) and os.path.realpath(name) not in known
    ]


def _some(keys: Iterable[str]) -> str:
    names = sorted(key.removeprefix("\0") for key in keys)
    return ", ".join(names[:MOST_NAMED]) + (" and others" if names[MOST_NAMED:] else "")


def _is_edits(name: str) -> bool:
    if is_remote(name) or not os.path.isfile(name):
        return False
    if name.endswith(SUFFIX):
        return True
    with BufferedReader(open_regular(Path(name), os.O_RDONLY)) as file:
        first = file.readline(MAX_LINE_BYTES)
    try:
        values = json.loads(first.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return False
    return isinstance(values, dict) and MARK in values


def _read(name: str) -> Iterator[tuple[str, Edit]]:
    with open(name, encoding="utf-8-sig", errors="surrogatepass") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _edit(line, f"{name}, line {number}")


def _edit(line: str, place: str) -> tuple[str, Edit]:
    try:
        values: Any = json.loads(line)
        own, text, before = values["id"], values["text"], values[MARK]
        if not (isinstance(text, str) and isinstance(before, str)):
            raise TypeError("text and edited_from must be texts")
        return key_of(own, values.get("line")), Edit(text=text, before=before)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(
            f'{place} is no edit, which is {{"id": ..., "text": "...", "{MARK}": "..."}}; found '
            f"{line.strip()[:80]!r}. Remove the line, or mend it"
        ) from error
