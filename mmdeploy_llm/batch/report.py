"""An HTML report of a captioning run: one file that needs nothing else, no network either.

Pictures are opened one after the other while the page is written, so memory does not grow with
their number.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import jinja2

from .records import CaptionRecord, seconds

MakeThumbnail = Callable[[bytes], bytes | None]
MAX_CARDS = 2000
MAX_FILE_BYTES = 256 * 2**20  # a larger file gets no preview


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportHead:
    """What stands above the pictures. speeds and settings: label -> value, in words."""

    model: str
    prompt: str
    created: str
    version: str
    speeds: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Card:
    """One picture on the page. thumbnail: base64 JPEG, None when there is no preview."""

    record: CaptionRecord
    thumbnail: str | None

    @property
    def name(self) -> str:
        return _printable(os.path.basename(self.record.path))

    @property
    def path(self) -> str:
        return _printable(self.record.path)


def write_report(
    path: Path,
    records: Sequence[CaptionRecord],
    head: ReportHead,
    make_thumbnail: MakeThumbnail,
    *,
    max_cards: int = MAX_CARDS,
) -> None:
    """Writes the page, in one move: a page is whole or not there.

    Of more than `max_cards` records the failed ones and then the first ones are shown, in the
    order of `records`; the totals are those of all.
    """
    shown = _shown(records, max_cards)
    values = {
        "head": head,
        "num_images": len(records),
        "num_failed": sum(not record.is_ok for record in records),
        "num_shown": len(shown),
        "num_output_tokens": sum(record.num_output_tokens for record in records),
        "num_image_tokens": sum(record.num_image_tokens for record in records),
        "cards": _cards(shown, make_thumbnail),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    copy = path.with_name(path.name + ".partial")
    with copy.open("w", encoding="utf-8", errors="replace") as file:
        file.writelines(_template().generate(values))
    os.replace(copy, path)


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["seconds"] = seconds
    environment.filters["thousands"] = thousands
    source = resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    return environment.from_string(source)


def thousands(number: int) -> str:
    """1234567 as "1 234 567", with spaces that no line breaks at."""
    return f"{number:,}".replace(",", "\u202f")


def _shown(records: Sequence[CaptionRecord], max_cards: int) -> Sequence[CaptionRecord]:
    if len(records) <= max_cards:
        return records
    by_need = sorted(range(len(records)), key=lambda place: records[place].is_ok)
    return [records[place] for place in sorted(by_need[:max_cards])]


def _cards(records: Sequence[CaptionRecord], make: MakeThumbnail) -> Iterator[_Card]:
    for record in records:
        yield _Card(record=record, thumbnail=_preview(record.path, make))


def _preview(path: str, make: MakeThumbnail) -> str | None:
    """The picture at `path`, small; None when it cannot be read (any more)."""
    try:
        if os.path.getsize(path) > MAX_FILE_BYTES:
            return None
        blob = Path(path).read_bytes()
    except OSError:
        return None
    small = make(blob)
    return None if small is None else base64.b64encode(small).decode("ascii")


def _printable(text: str) -> str:
    """File names can hold bytes that are no text."""
    return text.encode(errors="surrogateescape").decode(errors="replace")
