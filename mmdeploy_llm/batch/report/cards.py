"""Cards: the HTML of one item of a page, made once and kept while its record stays the same."""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from mmdeploy_llm.data.records.boxes import boxes_of
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.media.boxes.writing import MAX_SHOWN, svg
from mmdeploy_llm.messages import MEDIA_KINDS
from mmdeploy_llm.values.text.display import seconds

from .letters import language, searched, without_bidi_controls
from .pictures import JPEG, MP3, Picture, Pictures, printable
from .previews import is_refused, media_of

KEY_BYTES = 12
CARD = "card.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One item of the page: its record and pictures. key: see CardMaker.key."""

    record: Record
    pictures: tuple[Picture, ...]
    key: str = ""

    @property
    def path(self) -> str:
        """The item's file, else its id or line."""
        record = self.record
        if record.path is not None:
            return printable(record.path + record.part)
        return f"line {record.line}" if record.id is None else printable(str(record.id))

    @property
    def name(self) -> str:
        """The file name without folders, else the id or line."""
        return os.path.basename(self.path) if self.record.path is not None else self.path

    @property
    def shown(self) -> tuple[Picture, ...]:
        """The previews that are pictures."""
        return tuple(own for own in self.pictures if own.form == JPEG)

    @property
    def clips(self) -> tuple[Picture, ...]:
        """The previews that are sounds."""
        return tuple(own for own in self.pictures if own.form == MP3)

    @property
    def no_preview(self) -> str:
        """The words in the place of previews, "" for an item without media."""
        kinds = dict.fromkeys(own.kind for own in media_of(self.record))
        others = ", ".join(kind for kind in kinds if kind not in MEDIA_KINDS)
        return f"{others}: no preview" if others else "no preview" if kinds else ""

    @property
    def media_tokens(self) -> str:
        """Token counts by media kind, each followed by a comma: "64 image, "."""
        counts = self.record.media_tokens
        return "".join(f"{thousands(num)} {kind}, " for kind, num in counts.items())

    @property
    def overlay(self) -> Markup:
        """The drawing of the boxes over the item's picture, "" without any."""
        record = self.record
        found = boxes_of(record.boxes, record.picture_size) if record.boxes else None
        if found is None or len(self.shown) != 1:
            return Markup("")
        shown = found.boxes[:MAX_SHOWN]
        return Markup(svg([own.named(printable(own.label)) for own in shown], found.size))

    @property
    def boxes_text(self) -> str:
        """The number of boxes, and of those that are drawn where that is another one."""
        count = len(self.record.boxes)
        text = f"{thousands(count)} {'box' if count == 1 else 'boxes'}"
        return f"{text}, {MAX_SHOWN} of them drawn" if count > MAX_SHOWN else text

    @property
    def editable(self) -> str:
        """The names of the item in a line of edits, as JSON; "" where its one text is not all of
        its answer, or is not shown exactly as it is."""
        record, text = self.record, self.record.text
        is_exact = without_bidi_controls(text) == text
        if not record.has_one_text or record.embedding or not is_exact:
            return ""
        own = {"line": record.line} if record.id is None else {"id": record.id}
        return json.dumps({"id": None, **own})

    @property
    def language(self) -> str:
        """The language of the item's texts, as far as its letters tell."""
        record = self.record
        return language(
            " ".join((record.text, record.prompt or "", *map(str, record.answers.values())))
        )

    @property
    def words(self) -> str:
        """The lower-case text that the page's filter searches."""
        record = self.record
        error = record.error
        fault = "" if error is None else f"failed ({error.code}) {error.message}"
        samples = (str(sample.get("text") or "") for sample in record.outputs[1:])
        others = (*map(str, record.answers.values()), *samples)
        said = (record.lack, record.text, *others, record.reasoning, record.prompt)
        return searched(printable(" ".join((self.path, fault, *filter(None, said)))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A card as a page has it: its outcome, kind of failure ("" without), the words that a filter
    searches, and its HTML."""

    outcome: str
    failure: str
    words: str
    html: str

    @property
    def values(self) -> list[str]:
        """The row as the scripts of a page have it."""
        return [self.outcome, self.failure, self.words, self.html]


class CardMaker:
    """Makes the rows of records. rules: under which pictures are made."""

    def __init__(self, rules: str = "") -> None:
        self.environment = environment()
        # mypy: macros are attributes of a module made at run time.
        self._macros: Any = self.environment.get_template(CARD).module
        source = resources.files(__package__).joinpath(CARD).read_text("utf-8")
        self._rules = f"{source}\0{rules}"

    def make(self, record: Record, pictures: tuple[Picture, ...], *, is_final: bool = True) -> Row:
        """Returns the row of a record. is_final: whether a later page may use it again."""
        card = Card(record=record, pictures=pictures, key=self.key(record) if is_final else "")
        return Row(
            outcome=record.outcome,
            failure=without_bidi_controls(record.failure),
            words=card.words,
            html=str(self._macros.card_html(card)).strip(),
        )

    def key(self, record: Record) -> str:
        """Returns what is the same for the same answer to the same input, shown in the same way; ""
        for a record whose input has no digest, so that it may have changed."""
        if not record.item_digest:
            return ""
        own = (record.key, record.item_digest, record.config_digest, record.error, record.text)
        text = repr((*own, record.num_output_tokens, record.path, record.boxes, self._rules))
        return blake2b(text.encode(), digest_size=KEY_BYTES).hexdigest()

    def with_pictures(self, record: Record, pictures: Pictures, roots: Collection[str] = ()) -> Row:
        """Returns the row of a record with the pictures of its media. roots: see media_of."""
        shown = () if is_refused(record) else media_of(record, roots)
        found = (picture for media in shown for picture in pictures.of(media))
        return self.make(record, tuple(found))


class Cards:
    """Rows by the keys of their records, compressed. Thread-safe."""

    def __init__(self) -> None:
        self._rows: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, key: str, row: Row) -> None:
        """Keeps a row; none without a key."""
        if key:
            text = json.dumps(row.values, ensure_ascii=False).encode("utf-8", "replace")
            with self._lock:
                self._rows[key] = zlib.compress(text, 1)

    def get(self, key: str) -> Row | None:
        """Returns the row of a record; None when there is none."""
        with self._lock:
            found = self._rows.get(key)
        if found is None:
            return None
        outcome, failure, words, html = json.loads(zlib.decompress(found))
        return Row(outcome=outcome, failure=failure, words=words, html=html)


def environment() -> jinja2.Environment:
    folder = resources.files(__package__)
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text("utf-8")),
        autoescape=True,
        finalize=_shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["as_json"] = partial(json.dumps, ensure_ascii=False)
    environment.filters["seconds"] = seconds
    environment.filters["thousands"] = thousands
    return environment


def _shown(value: Any) -> Any:
    """Neutralises text that a template prints. Markup comes from a macro and has passed already."""
    return without_bidi_controls(value) if type(value) is str else value


def thousands(number: int) -> str:
    """Formats 1234567 as "1 234 567", with narrow non-breaking spaces."""
    return f"{number:,}".replace(",", "\u202f")
