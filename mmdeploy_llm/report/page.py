"""Writes an HTML report of a batch that a browser shows without a network.

Up to EMBEDDED_CARDS items, the report is one self-contained file. A larger report is a page with
the first items and a folder NAME_files beside it, which holds the pictures and the other items in
scripts of CHUNK_CARDS that the page loads in the background. Works from file:// and from a server.

Records and pictures are processed a few at once while the files are written, so memory does not
grow with their number.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import jinja2
from tqdm import tqdm

from mmdeploy_llm.batch.job import BatchSettings
from mmdeploy_llm.batch.summary import BatchSummary
from mmdeploy_llm.records.files import Folder, OutputLostError
from mmdeploy_llm.records.outcome import LACKING
from mmdeploy_llm.records.record import Record, seconds
from mmdeploy_llm.sinks.scan import RecordIndex

from .bidi import without_bidi_controls
from .pictures import (
    FOLDER,
    EmbeddedPictures,
    Picture,
    Pictures,
    PicturesInFiles,
    printable,
    remove_pictures,
    url_of,
)
from .previews import FilePreviews, MakePreviews, is_refused, media_of
from .target import check_page

EMBEDDED_CARDS = 300  # a report of more cards keeps its pictures in files
CHUNK_CARDS = 200
MAX_CARDS = 20_000
MAX_THREADS = 8  # threads that make pictures
CARDS_AT_ONCE = 32  # cards whose pictures are in memory together
_CHUNK = re.compile(r"cards-\d{3,}\.js")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportHead:
    """The header of a report.

    unit: the noun for one item.
    done: the verb for a finished item.
    speeds, settings: label -> value, both as text.
    missing: what is incomplete -> what it lacks; shown above everything else.
    facts: further label -> value, both as text, shown below the totals.
    """

    model: str
    created: str
    version: str
    prompt: str | None = None
    unit: str = "item"
    done: str = "answered"
    speeds: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def units(self) -> str:
        """The plural of `unit`."""
        return f"{self.unit}s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One item of the page: its record and pictures."""

    record: Record
    pictures: tuple[Picture, ...]

    @property
    def path(self) -> str:
        """The item's file, else its id or line."""
        record = self.record
        if record.path is not None:
            return printable(record.path)
        return f"line {record.line}" if record.id is None else printable(str(record.id))

    @property
    def name(self) -> str:
        """The file name without folders, else the id or line."""
        return os.path.basename(self.path) if self.record.path is not None else self.path

    @property
    def has_media(self) -> bool:
        """Whether the item has media, with or without a preview."""
        return bool(media_of(self.record))

    @property
    def num_text_tokens(self) -> int:
        """Prompt tokens that are not media tokens."""
        record = self.record
        return record.num_prompt_tokens - record.num_image_tokens - record.num_video_tokens

    @property
    def media_tokens(self) -> str:
        """Token counts by media kind, each followed by a plus: "64 image + "."""
        counts = {"image": self.record.num_image_tokens, "video": self.record.num_video_tokens}
        return "".join(f"{thousands(num)} {kind} + " for kind, num in counts.items() if num)

    @property
    def words(self) -> str:
        """The lower-case text that the page's filter searches."""
        record = self.record
        fault = f"failed ({record.error_code}) {record.error_msg}" if record.error_msg else ""
        samples = (str(sample.get("text") or "") for sample in record.outputs[1:])
        others = (*map(str, record.answers.values()), *samples)
        said = (record.lack, record.text, *others, record.reasoning, record.prompt)
        return printable(" ".join((self.path, fault, *filter(None, said))).lower())


def report_batch(
    summary: BatchSummary,
    path: str | os.PathLike[str],
    settings: BatchSettings,
    *,
    model: str,
    previews: FilePreviews,
    about: Mapping[str, Any] | None = None,
    is_caption: bool = False,
) -> None:
    """Writes a report of all items of the batch, including those of earlier runs.

    about: further settings to list.
    """
    run = summary.run
    speeds = {
        "images/s": f"{run.images_per_second:.1f}",
        "tokens/s": f"{run.tokens_per_second:.0f}",
    }
    params = settings.sampling_params
    given = {name: getattr(params, name) for name in params.model_fields_set}
    options = {**(about or {}), **given, **settings.chat_template_kwargs}
    head = ReportHead(
        model=model,
        prompt=settings.question,
        created=f"{datetime.datetime.now():%d %B %Y, %H:%M}",
        version=metadata.version("mmdeploy-llm"),
        unit="file" if is_caption else "item",
        done="captioned" if is_caption else "answered",
        speeds=speeds if run.num_items else {},
        settings={name: str(value) for name, value in options.items()},
        facts={"input": "; ".join(summary.notes)} if summary.notes else {},
    )
    num_shown = min(summary.num_records, MAX_CARDS)
    write_report(
        Path(path),
        summary.records(MAX_CARDS),
        head,
        summary.index,
        previews,
        num_shown=num_shown,
        rules=previews.rules if num_shown > EMBEDDED_CARDS else "",
        is_progress_shown=settings.is_progress_shown,
    )


def write_report(
    path: Path,
    records: Iterable[Record],
    head: ReportHead,
    index: RecordIndex,
    make: MakePreviews,
    *,
    num_shown: int,
    rules: str = "",
    is_progress_shown: bool | None = None,
) -> None:
    """Writes the page atomically: it is complete or absent.

    records: the `num_shown` records of the page, in order; `index` has the totals of all records.
    make: makes previews. rules: see PicturesInFiles. Raises ConfigError as `check_page` does, and
    OutputLostError when an output changed while it was read.
    """
    check_page(path)
    hidden = None if is_progress_shown is None else not is_progress_shown
    with (
        Folder.open(path.parent) as parent,
        ThreadPoolExecutor(_num_threads(), thread_name_prefix="previews") as pool,
        tqdm(total=num_shown, desc="Report", dynamic_ncols=True, disable=hidden) as bar,
    ):

        def cards(pictures: Pictures) -> Iterator[Card]:
            return _counted(_cards(records, pictures, pool), num_shown, bar.update)

        page = _Page(parent=parent, name=path.name, head=head, index=index, num_shown=num_shown)
        if num_shown > EMBEDDED_CARDS:
            page.write_large(cards, make, rules)
        else:
            page.write_single(cards(EmbeddedPictures(make)))
        parent.check_in_place()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    """A page of this name in the folder `parent`; the files beside it are in NAME_files."""

    parent: Folder
    name: str
    head: ReportHead
    index: RecordIndex
    num_shown: int

    def write_single(self, cards: Iterable[Card]) -> None:
        """Writes one self-contained file and removes the files of an earlier, larger report."""
        self._write(_environment(), cards, [])
        beside = self.parent.existing(self._beside)
        if beside is None:  # or a link, which leads to files of somebody else
            return
        with beside:
            _remove_old_chunks(beside, set())
            old = beside.existing(FOLDER)
            if old is not None:
                with old:
                    remove_pictures(old)

    def write_large(
        self, cards: Callable[[Pictures], Iterator[Card]], make: MakePreviews, rules: str
    ) -> None:
        """Writes the page with the first cards; the others and the pictures to files beside it."""
        environment = _environment()
        url = url_of(self._beside)
        with self.parent.inner(self._beside) as beside:
            pictures = PicturesInFiles(make, beside, url, rules)
            with closing(pictures):
                shown = cards(pictures)
                first = list(itertools.islice(shown, CHUNK_CARDS))
                names = _write_chunks(beside, shown, environment)
                self._write(environment, first, [f"{url}/{name}" for name in names])
                pictures.finish()
            _remove_old_chunks(beside, set(names))
            beside.check_in_place()

    @property
    def _beside(self) -> str:
        return f"{Path(self.name).stem}_files"

    def _write(
        self, environment: jinja2.Environment, cards: Iterable[Card], chunks: list[str]
    ) -> None:
        page = _page(
            environment, self.head, self.index, self.num_shown, cards, chunks, self._beside
        )
        self.parent.write(self.name, _encoded(page))


def _page(
    environment: jinja2.Environment,
    head: ReportHead,
    index: RecordIndex,
    num_shown: int,
    cards: Iterable[Card],
    chunks: list[str],
    folder: str,
) -> Iterator[str]:
    values = {
        "head": head,
        # For file://, browsers treat the page and the files beside it as different origins.
        "head_sources": " 'self' file:" if chunks else "",
        "num_items": len(index),
        "num_failed": index.num_failed,
        "lacking": {name: index.outcomes[name] for name in LACKING if index.outcomes[name]},
        "failures": dict(index.failures.most_common()),
        "num_shown": num_shown,
        "num_output_tokens": index.num_output_tokens,
        "num_media_tokens": index.num_media_tokens,
        "cards": cards,
        "chunks": chunks,
        "folder": folder,
    }
    return environment.get_template("report.html").generate(values)


def _write_chunks(
    folder: Folder, cards: Iterator[Card], environment: jinja2.Environment
) -> list[str]:
    """Writes the remaining cards as scripts that call the page; returns the scripts' names."""
    names: list[str] = []
    # mypy: macros are attributes of a module made at run time.
    card_html: Any = environment.get_template("card.html").module
    while chunk := list(itertools.islice(cards, CHUNK_CARDS)):
        rows = [
            [
                card.record.outcome,
                "" if card.record.is_ok else _shown(card.record.failure),
                card.words,
                _html(card_html, card),
            ]
            for card in chunk
        ]
        names.append(f"cards-{len(names) + 1:03d}.js")
        text = json.dumps(rows, ensure_ascii=False, separators=(",", ":"))
        folder.write(names[-1], _encoded([f"reportCards({text});\n"]))
    return names


def _html(macros: Any, card: Card) -> str:
    return str(macros.card_html(card)).strip()


def _remove_old_chunks(folder: Folder, kept: set[str]) -> None:
    """Removes the scripts of earlier reports. Raises OutputLostError when one of `kept` is
    missing."""
    found = set(filter(_CHUNK.fullmatch, folder.names()))
    for name in found - kept:
        folder.remove(name)
    if kept - found:
        raise OutputLostError(
            f"files in {str(folder.path)!r} were removed while the report was written; write it "
            "again"
        )


def _encoded(texts: Iterable[str]) -> Iterator[bytes]:
    return (text.encode("utf-8", "replace") for text in texts)


def _environment() -> jinja2.Environment:
    folder = resources.files(__package__)
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text("utf-8")),
        autoescape=True,
        finalize=_shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["seconds"] = seconds
    environment.filters["thousands"] = thousands
    return environment


def _shown(value: Any) -> Any:
    """Neutralises text that a template prints. Markup comes from a macro and has passed already."""
    return without_bidi_controls(value) if type(value) is str else value


def thousands(number: int) -> str:
    """Formats 1234567 as "1 234 567", with narrow non-breaking spaces."""
    return f"{number:,}".replace(",", "\u202f")


def _num_threads() -> int:
    return min(MAX_THREADS, os.cpu_count() or 1)


def _cards(
    records: Iterable[Record], pictures: Pictures, pool: ThreadPoolExecutor
) -> Iterator[Card]:
    """Yields cards in the order of the records; makes pictures in the pool's threads."""

    def make(record: Record) -> Card:
        shown = () if is_refused(record) else media_of(record)
        found = (picture for media in shown for picture in pictures.of(media))
        return Card(record=record, pictures=tuple(found))

    source = iter(records)
    while group := list(itertools.islice(source, CARDS_AT_ONCE)):
        yield from pool.map(make, group)


def _counted(cards: Iterator[Card], wanted: int, count: Callable[[], Any]) -> Iterator[Card]:
    """Raises OutputLostError when there are not as many cards as wanted."""
    number = 0
    for card in cards:
        number += 1
        yield card
        count()
    if number != wanted:
        raise OutputLostError(
            f"{number} of {wanted} items were found for the report: an output changed while it "
            "was read; write the report again"
        )
