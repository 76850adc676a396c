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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from mmdeploy_llm.batch.settings import BatchSettings
from mmdeploy_llm.batch.summary import BatchSummary
from mmdeploy_llm.data.outputs.opening.merged import MergedOutputs
from mmdeploy_llm.data.outputs.scan import RecordIndex
from mmdeploy_llm.data.records.files import Folder, OutputLostError
from mmdeploy_llm.data.records.outcome import LACKING
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.system.guarding.claims import claimed
from mmdeploy_llm.system.portable.machine import num_cpus
from mmdeploy_llm.values.text.progress_bars import UseTqdm, open_bar

from .cards import CardMaker, Row, environment
from .pictures import (
    FOLDER,
    EmbeddedPictures,
    Pictures,
    PicturesInFiles,
    Strips,
    Thumb,
    remove_pictures,
    thumbs_of,
    url_of,
)
from .previews import FilePreviews, MakePreviews, roots_of
from .target import check_page

EMBEDDED_CARDS = 300  # a report of more cards keeps its pictures in files
CHUNK_CARDS = 200
MAX_CARDS = 20_000
MAX_THREADS = 8  # threads that make pictures
CARDS_AT_ONCE = 32  # cards whose pictures are in memory together
_CHUNK = re.compile(r"cards-\d{3,}\.js")


class Made(Protocol):
    """The rows that a run has made. maker: what has made them. are_in_files: whether their pictures
    are files. is_hurried: whether nobody waits for the pictures of the others."""

    maker: CardMaker
    are_in_files: bool
    is_hurried: bool

    def row(self, record: Record) -> Row | None:
        """Returns the row of a record, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportHead:
    """The header of a report.

    unit: the noun for one item.
    done: the verb for a finished item.
    speeds, settings: label -> value, both as text.
    missing: what is incomplete -> what it lacks; shown above everything else.
    running: how far the run is; "" of one that has ended.
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
    running: str = ""

    @property
    def units(self) -> str:
        """The plural of `unit`."""
        return f"{self.unit}s"


def report_batch(
    summary: BatchSummary,
    path: str | os.PathLike[str],
    settings: BatchSettings,
    *,
    model: str,
    previews: FilePreviews,
    about: Mapping[str, Any] | None = None,
    is_caption: bool = False,
    kinds: Iterable[str] = (),
    made: Made | None = None,
    strips: Strips = (),
    facts: Mapping[str, str] | None = None,
) -> None:
    """Writes a report of all items of the batch, including those of earlier runs.

    about: further settings to list. kinds: see head_of. made: the cards that the run has made
    already. strips: of items that are near to each other. facts: see ReportHead.
    """
    run = summary.run
    speeds = {
        f"{summary.unit}s/s": f"{run.items_per_second:.1f}",
        "tokens/s": f"{run.tokens_per_second:.0f}",
    }
    head = replace(
        head_of(settings, model, about, is_caption=is_caption, kinds=kinds),
        speeds=speeds if run.num_items else {},
        facts={**({"input": "; ".join(summary.notes)} if summary.notes else {}), **(facts or {})},
    )
    num_shown = min(summary.num_records, MAX_CARDS)
    write_report(
        Path(path),
        summary.records(MAX_CARDS),
        head,
        summary.index,
        previews,
        num_shown=num_shown,
        rules=previews.rules if num_shown > EMBEDDED_CARDS or made is not None else "",
        use_tqdm=settings.use_tqdm,
        made=made,
        roots=roots_of(summary.sink),
        strips=strips,
    )


def head_of(
    settings: BatchSettings,
    model: str,
    about: Mapping[str, Any] | None = None,
    *,
    is_caption: bool = False,
    running: str = "",
    kinds: Iterable[str] = (),
) -> ReportHead:
    """Returns the header of the report of a batch. about: further settings to list. kinds: of the
    files, which are described unless there is a question."""
    params = settings.sampling_params
    given = {name: getattr(params, name) for name in params.model_fields_set}
    options = {**(about or {}), **given, **settings.chat_template_kwargs}
    asked = settings.question
    if is_caption and asked is None:
        asked = " ".join(dict.fromkeys(map(settings.asks.described, kinds))) or None
    return ReportHead(
        model=model,
        prompt=asked,
        created=f"{datetime.datetime.now():%d %B %Y, %H:%M}",
        version=metadata.version("mmdeploy-llm"),
        unit="file" if is_caption else "item",
        done="captioned" if is_caption else settings.asks.done,
        settings={name: str(value) for name, value in options.items()},
        running=running,
    )


def merged_head(merged: MergedOutputs) -> ReportHead:
    """Returns the head of a page over several outputs, with what is missing and the outputs."""
    return ReportHead(
        model=", ".join(merged.models) or "an unknown model",
        created=f"{datetime.datetime.now():%d %B %Y, %H:%M}",
        version=metadata.version("mmdeploy-llm"),
        missing=merged.missing(),
        settings={each.label: f"{each.num_items} items" for each in merged.outputs},
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
    use_tqdm: UseTqdm | None = None,
    made: Made | None = None,
    roots: Collection[str] = (),
    strips: Strips = (),
) -> None:
    """Writes the page atomically: it is complete or absent.

    records: the `num_shown` records of the page, in order; `index` has the totals of all records.
    make: makes previews. rules: see PicturesInFiles. made: rows that exist already. roots: see
    media_of. strips: shown above the cards. Raises ConfigError as `check_page` does and where
    another run writes the page, and OutputLostError when an output changed while it was read.
    """
    check_page(path)
    with (
        claimed(path) if made is None else nullcontext(),  # else the run has claimed it
        Folder.open(path.parent) as parent,
        ThreadPoolExecutor(_num_threads(), thread_name_prefix="previews") as pool,
        closing(open_bar(use_tqdm, total=num_shown, desc="Report")) as bar,
    ):
        maker = CardMaker(rules) if made is None else made.maker

        def rows(pictures: Pictures) -> Iterator[Row]:
            found = _rows(records, pictures, pool, maker, made, roots)
            return _counted(found, num_shown, bar.update)

        page = Page(
            parent=parent,
            name=path.name,
            head=head,
            index=index,
            num_shown=num_shown,
            thumbs=partial(thumbs_of, strips, roots=roots),
        )
        if num_shown > EMBEDDED_CARDS or (made is not None and made.are_in_files):
            page.write_large(rows, make, rules)
        else:
            pictures = EmbeddedPictures(make)
            page.write_single(rows(pictures), page.thumbs(pictures))
        parent.check_in_place()


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page of this name in the folder `parent`; the files beside it are in NAME_files."""

    parent: Folder
    name: str
    head: ReportHead
    index: RecordIndex
    num_shown: int
    thumbs: Callable[[Pictures], list[list[Thumb]]] = lambda pictures: []

    def write_single(self, rows: Iterable[Row], thumbs: list[list[Thumb]]) -> None:
        """Writes one self-contained file and removes the files of an earlier, larger report."""
        self.write(rows, [], thumbs=thumbs)
        beside = self.parent.existing(self.beside)
        if beside is None:  # or a link, which leads to files of somebody else
            return
        with beside:
            _remove_old_chunks(beside, set())
            old = beside.existing(FOLDER)
            if old is not None:
                with old:
                    remove_pictures(old)

    def write_large(
        self, rows: Callable[[Pictures], Iterator[Row]], make: MakePreviews, rules: str
    ) -> None:
        """Writes the page with the first cards; the others and the pictures to files beside it."""
        url = url_of(self.beside)
        with self.parent.inner(self.beside) as beside:
            pictures = PicturesInFiles(make, beside, url, rules)
            with closing(pictures):
                shown = rows(pictures)
                first = list(itertools.islice(shown, CHUNK_CARDS))
                for row in first:
                    pictures.keep(row.html)
                names = _write_chunks(beside, shown, pictures)
                chunks = [f"{url}/{name}" for name in names]
                self.write(first, chunks, has_files=True, thumbs=self.thumbs(pictures))
                pictures.finish()
            _remove_old_chunks(beside, set(names))
            beside.check_in_place()

    @property
    def beside(self) -> str:
        """The name of the folder beside the page."""
        return f"{Path(self.name).stem}_files"

    def write(
        self,
        rows: Iterable[Row],
        chunks: list[str],
        *,
        has_files: bool = False,
        thumbs: Sequence[Sequence[Thumb]] = (),
    ) -> None:
        """Writes the page itself, which loads the chunks. has_files: whether it may show files."""
        page = self._text(rows, chunks, has_files, thumbs)
        self.parent.write(self.name, _encoded(page))

    def _text(
        self,
        rows: Iterable[Row],
        chunks: list[str],
        has_files: bool,
        thumbs: Sequence[Sequence[Thumb]],
    ) -> Iterator[str]:
        index = self.index
        values = {
            "head": self.head,
            "strips": thumbs,
            # For file://, browsers treat the page and the files beside it as different origins.
            "head_sources": " 'self' file:" if has_files else "",
            "num_items": len(index),
            "num_failed": index.num_failed,
            "lacking": {name: index.outcomes[name] for name in LACKING if index.outcomes[name]},
            "failures": dict(index.failures.most_common()),
            "num_shown": self.num_shown,
            "num_output_tokens": index.num_output_tokens,
            "num_media_tokens": index.num_media_tokens,
            "rows": rows,
            "chunks": chunks,
            "folder": self.beside,
        }
        return environment().get_template("report.html").generate(values)


def _write_chunks(folder: Folder, rows: Iterator[Row], pictures: PicturesInFiles) -> list[str]:
    """Writes the remaining cards as scripts that call the page; returns the scripts' names."""
    names: list[str] = []
    while chunk := list(itertools.islice(rows, CHUNK_CARDS)):
        for row in chunk:
            pictures.keep(row.html)
        names.append(write_chunk(folder, len(names) + 1, chunk))
    return names


def write_chunk(folder: Folder, number: int, rows: Iterable[Row]) -> str:
    """Writes a script of cards; returns its name."""
    name = f"cards-{number:03d}.js"
    text = json.dumps([row.values for row in rows], ensure_ascii=False, separators=(",", ":"))
    folder.write(name, _encoded([f"reportCards({text});\n"]))
    return name


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


def _num_threads() -> int:
    return min(MAX_THREADS, num_cpus())


def _rows(
    records: Iterable[Record],
    pictures: Pictures,
    pool: ThreadPoolExecutor,
    maker: CardMaker,
    made: Made | None,
    roots: Collection[str],
) -> Iterator[Row]:
    """Yields rows in the order of the records; makes those that do not exist in the pool's
    threads, without pictures after an interruption."""

    def make(record: Record) -> Row:
        found = None if made is None else made.row(record)
        if found is not None and pictures.have(found.html):
            return found
        if made is not None and made.is_hurried:
            return maker.make(record, (), is_final=False)
        return maker.with_pictures(record, pictures, roots)

    source = iter(records)
    while group := list(itertools.islice(source, CARDS_AT_ONCE)):
        yield from pool.map(make, group)


def _counted(cards: Iterator[Row], wanted: int, count: Callable[[], Any]) -> Iterator[Row]:
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
