"""Turns a row of a corpus into an item: a chat message with the row's media and the question,
unless the row is one of our own lines, with a prompt in it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from mmdeploy_llm.batch.items import KNOWN_KEYS, ItemReader
from mmdeploy_llm.batch.questions.asks import NO_ASKS, Asks
from mmdeploy_llm.data.files.page_choice import document_id, page_of
from mmdeploy_llm.data.openai.lines import OpenAILines, custom_id_of, is_openai_line
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.records.template import Template, column_value, shown, text_of
from mmdeploy_llm.data.rows.names import BUILT_IN_KINDS
from mmdeploy_llm.data.rows.rows import BadItem, FirstLines, Row, Rows
from mmdeploy_llm.engine.intake.prompts import CONTENT_KEYS
from mmdeploy_llm.errors import ConfigError, RequestError
from mmdeploy_llm.hooks import KindTable
from mmdeploy_llm.media.loading.forms import MEDIA_KEYS

from .cells import media_values
from .columns import (
    ALL,
    Column,
    ColumnOptions,
    by_suffix,
    check_columns,
    detect,
    names_of_files,
    unused,
)

logger = logging.getLogger(__name__)

ONE_QUESTION = (
    "a prompt for all items needs a folder of media or a corpus without prompts; each line of this "
    "one has its own prompt"
)
# Keys of our own lines that mean the same in a row with a question.
KEPT = (
    "id",
    "sampling_params",
    "chat_template_kwargs",
    "mm_processor_kwargs",
    "tools",
    "priority",
    "timeout",
)
NUM_LOOKED_AT = 8  # first rows, to find the column of the media
NOT_USED = (
    "columns that look like media and are not used: %s; name them with --media-column KIND=NAME "
    "(in Python media_column)"
)


class QuestionReader:
    """Builds the items of one corpus.

    question: for all rows, with columns in it; asks: several of them by name. None of both: the
        row's own, or a description. kinds: of media.
    """

    def __init__(
        self,
        rows: Rows,
        reader: ItemReader,
        options: ColumnOptions,
        question: str | None = None,
        asks: Asks = NO_ASKS,
        kinds: KindTable = BUILT_IN_KINDS,
    ) -> None:
        asks.check(question)
        options.check(kinds)
        if (question is not None or asks.questions) and options.prompt is not None:
            name = "ask" if asks.questions else "prompt"
            raise ConfigError(
                f"--{name} and --prompt-column (in Python {name} and prompt_column) contradict "
                "each other; give one of them"
            )
        self._reader, self._options, self._rows, self._kinds = reader, options, rows, kinds
        self._asks = asks
        texts = asks.questions if question is None else {"": question}
        self._templates = {name: Template(text) for name, text in texts.items()}
        self._media = options.media_columns
        self._is_found = bool(self._media)
        self._seen: set[str] | None = None  # columns of which the first rows show what they hold
        self._openai = OpenAILines()
        self._look()

    @property
    def about(self) -> str:
        """Says which columns have media; "" for lines with their own prompts."""
        if self._rows.is_by_suffix and not self._media:
            *others, last = self._kinds.kinds
            found = f"media: members with the suffix of an {', '.join(others)} or {last}"
        elif not self._media:
            return ""
        else:
            found = ", ".join(map(str, self._media))
        return found if self._is_found else f"{found} (found in the first rows)"

    def read(self, row: Row | BadItem) -> Item | BadItem:
        """Returns the item of a row, or a BadItem that says what is wrong with it. A row that
        cannot be used keeps its id, by which a resumed run knows it once it is mended."""
        if isinstance(row, BadItem):
            return row if row.id is not None else replace(row, id=self._known_id(row.values))
        try:
            if is_openai_line(row.values):
                return self._shaped(self._read_openai(row), is_ours=False)
            return self._read(row)
        except RequestError as error:
            kind, code = type(error).__name__, error.code
            own = self._known_id(row.values) if row.key is None else row.key
            return BadItem(line=row.line, id=own, message=str(error), kind=kind, code=code)

    def _shaped(self, item: Item | BadItem, *, is_ours: bool) -> Item | BadItem:
        return item if isinstance(item, BadItem) else self._asks.shaped(item, is_ours=is_ours)

    def _known_id(self, values: Any) -> str | int | None:
        """Returns the id that the column with ids, or the key `id`, has."""
        if is_openai_line(values):
            return custom_id_of(values)
        own = values.get(self._options.id or "id") if isinstance(values, Mapping) else None
        is_id = isinstance(own, (str, int)) and not isinstance(own, bool) and own != ""
        return own if is_id else None

    def _read_openai(self, row: Row) -> Item | BadItem:
        if self._templates or self._options.prompt is not None:
            raise RequestError(ONE_QUESTION)
        columns = {name: column_value(row.values, name) for name in self._options.carried}
        found = self._openai.translated(row.values)
        return self._reader.read(
            row.line, found.fields, folder=row.folder, columns=columns, endpoint=found.endpoint
        )

    def _look(self) -> None:
        """Looks at the first rows, to raise ConfigError for what is wrong with all of them."""
        is_asked = bool(self._templates or self._options.values())
        if not (self._rows.is_table or is_asked) or not self._rows.is_repeatable:
            return
        sample = [
            row.values
            for row in islice(self._rows.read(FirstLines(count=NUM_LOOKED_AT)), NUM_LOOKED_AT)
            if isinstance(row, Row) and isinstance(row.values, Mapping)
        ]
        if not sample:  # every row is an error of its own
            return
        columns = list(dict.fromkeys(name for values in sample for name in values))
        if self._rows.is_table:
            check_columns(columns, self._options, self._templates.values())
            if not self._media:
                self._media = detect(sample, self._kinds)
        if self._templates and all(map(self._has_own, sample)):
            raise ConfigError(ONE_QUESTION)
        has_text = bool(self._templates) or self._options.prompt is not None
        has_own = any(map(self._has_own, sample))
        if has_text and not (self._media or has_own or self._rows.is_by_suffix):
            self._media = detect(sample, self._kinds)  # lines, whose media would go unseen
        read = {*self._options.names, *(own.name for own in self._media)}
        read.update(name for own in self._templates.values() for name in own.names)
        left: list[str] = []
        if not self._rows.is_by_suffix:
            has_value = {n for values in sample for n, value in values.items() if value is not None}
            self._seen = read | has_value
            left = unused(sample, read, self._kinds)
        if not (self._media or self._rows.is_by_suffix):  # names of files are then meant as such
            left += [
                own for own in names_of_files(sample, self._kinds) if own not in (*left, *read)
            ]
        if left:
            logger.warning(NOT_USED, shown(left))
        if self._rows.is_table and not (self._media or has_text or has_own):
            raise ConfigError(
                f"no column has media or prompts: {shown(columns)}; name one with --image-column, "
                "--video-column, --audio-column, --media-column KIND=NAME or --prompt-column, or "
                'write it into the question: --prompt "Summarize: {text}" (in Python image_column, '
                "..., prompt)"
            )

    def _has_own(self, values: Mapping[str, Any]) -> bool:
        """Returns whether the row is one of our own lines, with a prompt in it. A `prompt` beside
        an image is a column like others, and so is one that the question names."""
        if is_openai_line(values):
            return True
        own = {name for name in CONTENT_KEYS if values.get(name) is not None}
        is_named = any("prompt" in own.names for own in self._templates.values())
        if is_named or self._options.prompt == "prompt" or self._media_of(values):
            own.discard("prompt")
        return bool(own)

    def _media_of(self, values: Mapping[str, Any]) -> tuple[Column, ...]:
        if self._media or not self._rows.is_by_suffix:
            return self._media
        return tuple(by_suffix(values, self._kinds))

    def _read(self, row: Row) -> Item | BadItem:
        values = row.values
        if not isinstance(values, Mapping):
            return self._reader.read(row.line, values)
        media = self._media_of(values)
        columns = {name: column_value(values, name) for name in self._names_carried(values, media)}
        asked = self._asked(values, media)
        names: list[str | None] = []
        if asked is None:
            left_out = (*columns, self._options.id, "__key__")
            kept = (name for name in values if name not in left_out or name in KNOWN_KEYS)
            fields = {name: values[name] for name in kept if values[name] is not None}
        else:
            self._check_unseen(values)
            cells = [own for column in media for own in _cells(column, row, self._kinds)]
            if media and not cells:
                raise RequestError(f"{_missing(media, values)}; the columns are {shown(values)}")
            names = [cell.name for cell in cells]
            fields = _asked(values, [cell.part for cell in cells], asked)
        item = self._reader.read(
            row.line, self._with_id(row, fields), folder=row.folder, names=names, columns=columns
        )
        return self._shaped(item, is_ours=asked is not None)

    def _check_unseen(self, values: Mapping[str, Any]) -> None:
        """Tells of media in a column that was empty in the first rows: once, as of the columns
        there, where the media's columns were named. Raises RequestError where they were looked
        for, since this one would have been found."""
        if self._seen is None:
            return
        later = {n: own for n, own in values.items() if own is not None and n not in self._seen}
        if later and (found := unused([later], (), self._kinds)):
            if self._is_found:
                self._seen = self._seen | set(found)
                logger.warning(NOT_USED, shown(found))
                return
            raise RequestError(
                f"the column {found[0]!r} looks like media, and is empty in the first "
                f"{NUM_LOOKED_AT} rows; name it with --media-column KIND={found[0]} (in Python "
                "media_column)"
            )

    def _names_carried(self, values: Mapping[str, Any], media: tuple[Column, ...]) -> Iterator[str]:
        """Yields the columns that the record repeats. ALL are those without media and bytes that
        are none of our own keys."""
        for name in self._options.carried:
            if name != ALL:
                yield name
                continue
            left_out = {*(own.name for own in media), *self._options.carried, *KNOWN_KEYS}
            yield from (
                own for own in values if own not in left_out and _is_carried(values[own], own)
            )

    def _asked(
        self, values: Mapping[str, Any], media: tuple[Column, ...]
    ) -> Mapping[str, Any] | None:
        """Returns the questions about a row by name, "" of a single one; None for one of our own
        lines."""
        if self._templates:
            if self._has_own(values):
                raise RequestError(ONE_QUESTION)
            reads_any = any(own.names for own in self._templates.values())
            if self._rows.is_by_suffix and not media and not reads_any:
                raise RequestError(
                    "no member of the sample has the suffix of media, and the question reads no "
                    f"column; the columns are {shown(values)}"
                )
            return {name: own.fill(values) for name, own in self._templates.items()}
        if self._options.prompt is not None:
            return {"": text_of(values, self._options.prompt)}
        if not media:
            return None
        if isinstance(values.get("ask"), Mapping):
            return dict(values["ask"])
        if isinstance(values.get("prompt"), str):
            return {"": values["prompt"]}
        return {"": self._asks.described(media[0].kind)}

    def _with_id(self, row: Row, fields: dict[str, Any]) -> dict[str, Any]:
        if self._options.id is not None:
            if row.values.get(self._options.id) is None:
                raise RequestError(f"the column {self._options.id!r} with the id is empty")
            return {**fields, "id": row.values[self._options.id]}
        return fields if row.key is None else {**fields, "id": row.key}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """A media item of a row: the part of a message, and a name unless it has a path."""

    part: dict[str, Any]
    name: str | None


def _cells(column: Column, row: Row, kinds: KindTable) -> Iterator[_Cell]:
    """Yields the media of a cell. A name that a corpus gives to bytes is never used: it could be
    that of a file here. Names of documents may end in #page=3. Raises RequestError."""
    try:
        found = list(media_values(row.values.get(column.name), column.kind, kinds))
    except RequestError as error:
        raise RequestError(f"column {column.name!r}: {error}") from None
    for number, value in enumerate(found):
        mark = f"{column.name}[{number}]" if len(found) > 1 else column.name
        name: str | None = f"({mark} of {row.key or f'row {row.line}'})"
        if isinstance(value, Mapping) and "array" in value:
            others = {own: value[own] for own in value if own != "array"}
            value = {column.kind: value["array"], **others}
        if isinstance(value, str):
            name = None
            if column.kind in kinds.yields and document_id(value) != value:
                value = {column.kind: document_id(value), "pages": str(page_of(value))}
        yield _Cell(part={"type": column.kind, column.kind: value}, name=name)


def _asked(
    values: Mapping[str, Any], parts: list[dict[str, Any]], asked: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns a row as one of our own lines: one message with its media, and its questions."""
    if left := [name for name in (*CONTENT_KEYS[1:], *MEDIA_KEYS) if values.get(name)]:
        raise RequestError(
            f"the row has {left[0]!r}, and media of its own or a question for all rows; leave one "
            "of them out"
        )
    fields = {name: values[name] for name in KEPT if values.get(name) is not None}
    if set(asked) == {""}:
        content = [*parts, *([{"type": "text", "text": asked[""]}] if asked[""] else [])]
        return {**fields, "messages": [{"role": "user", "content": content}]}
    return {**fields, "messages": [{"role": "user", "content": parts}], "ask": asked}


def _missing(media: tuple[Column, ...], values: Mapping[str, Any]) -> str:
    name = media[0].name
    return f"the column {name!r} is empty" if name in values else f"the row has no column {name!r}"


def _is_carried(value: Any, name: str) -> bool:
    """Returns whether a record can repeat a value: not bytes, nor anything that holds some."""
    try:
        column_value({name: value}, name)
    except RequestError:
        return False
    return True
