"""GrowingReport: makes the cards of a run while it goes on, and shows them now and then.

    run --take--> queue --> a thread of its own: pictures, cards --> page, every few seconds
                    '-- full: the card is made at the end of the run

Pictures are made of the bytes that the item still holds, so that a corpus is not read again. At the
end write_report puts the cards in the order of the input and makes those that are missing.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmdeploy_llm.batch.run import Tally
from mmdeploy_llm.data.outputs.scan import RecordIndex
from mmdeploy_llm.data.records.files import Folder
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.errors import ConfigError, MMDeployLLMError
from mmdeploy_llm.values.text.display import duration

from .cards import CardMaker, Cards, Row
from .kept import read_kept
from .page import CHUNK_CARDS, EMBEDDED_CARDS, MAX_CARDS, Page, ReportHead, write_chunk
from .pictures import EmbeddedPictures, Picture, Pictures, PicturesInFiles, url_of
from .previews import FilePreviews, bytes_of, is_refused, media_of
from .target import check_page

logger = logging.getLogger(__name__)

MAX_WAITING = 64  # records whose cards are not made yet, with the media that they hold
FIRST_SECONDS = 2.0  # until the page is written for the first time
PAGE_SHARE = 40  # a page is written again after this many times the seconds that it took
STOP_SECONDS = 2.0  # for a card that is being made when nobody waits


class GrowingReport:
    """Watches a run; see Watch and page.Made.

    head: returns the header for what is said about the run. total: items of the input, if known.
    is_resumed: whether cards of an earlier page are used again.
    """

    def __init__(
        self,
        path: Path,
        head: Callable[[str], ReportHead],
        previews: FilePreviews,
        *,
        total: int | None,
        is_resumed: bool = False,
    ) -> None:
        check_page(path)
        self.maker = CardMaker(previews.rules)
        self.are_in_files = total is not None and total > EMBEDDED_CARDS
        self.is_hurried = False
        self.num_pages = 0
        self.busy_seconds = 0.0  # of the thread, on a CPU
        self._path, self._head, self._previews, self._is_resumed = path, head, previews, is_resumed
        self._cards = Cards()
        self._shown: list[Row] = []  # the first ones, which stand in the page itself
        self._rest: list[Row] = []  # of the script that is not full yet
        self._chunks: list[str] = []
        self._index = RecordIndex()
        self._queue: queue.Queue[tuple[Record, Item | BadItem]] = queue.Queue(MAX_WAITING)
        self._tally: Tally | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="report", daemon=True)

    def begin(self, tally: Tally) -> None:
        """Starts the thread."""
        self._tally = tally
        self._thread.start()

    def take(self, record: Record, item: Item | BadItem) -> None:
        """Has the card of a record made, unless too many wait: then it is made at the end."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait((record, item))

    def state(self) -> dict[str, Any]:
        """Returns how far the run is, for a page that is open in a browser."""
        tally = self._tally
        return {
            "text": _said(tally),
            "pages": self.num_pages,
            "is_over": self._is_over.is_set(),
            **({} if tally is None else tally.progress()),
        }

    def finish(self, *, is_hurried: bool) -> None:
        """Ends the thread. is_hurried: what waits is not made any more."""
        self.is_hurried = is_hurried
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS if is_hurried else None)
        elif self._tally is None and self._is_resumed:  # nothing was left to do
            with (
                contextlib.suppress(OSError, ConfigError),
                Folder.open(self._path.parent) as parent,
            ):
                self._keep(parent, self._page(parent, "").beside)

    def row(self, record: Record) -> Row | None:
        """Returns the card of a record, if there is one."""
        return self._cards.get(self.maker.key(record))

    def _work(self) -> None:
        """Makes cards and writes pages until the run is over, in the report's own thread."""
        try:
            with contextlib.ExitStack() as stack:
                parent = stack.enter_context(Folder.open(self._path.parent))
                page = self._page(parent, "")
                if self._is_resumed:
                    self._keep(parent, page.beside)
                beside = (
                    stack.enter_context(parent.inner(page.beside)) if self.are_in_files else None
                )
                pictures = self._pictures(stack, beside, page.beside)
                self._loop(parent, beside, pictures)
        except (MMDeployLLMError, OSError) as error:  # the end of the run tries again, and tells
            logger.warning("the report cannot be written while the run goes on: %s", error)

    def _pictures(self, stack: contextlib.ExitStack, beside: Folder | None, name: str) -> Pictures:
        if beside is None:
            return EmbeddedPictures(self._previews)
        made = PicturesInFiles(self._previews, beside, url_of(name), self._previews.rules)
        stack.callback(made.close)
        return made

    def _loop(self, parent: Folder, beside: Folder | None, pictures: Pictures) -> None:
        due, begun = time.monotonic() + FIRST_SECONDS, time.thread_time()
        while not (self._is_over.is_set() and (self.is_hurried or self._queue.empty())):
            with contextlib.suppress(queue.Empty):
                self._add(*self._queue.get(timeout=0.2), pictures, beside)
            if time.monotonic() > due and not self._is_over.is_set():
                before = time.monotonic()
                self._write(parent)
                now = time.monotonic()
                due = now + max(FIRST_SECONDS, PAGE_SHARE * (now - before))
            self.busy_seconds = time.thread_time() - begun

    def _add(
        self, record: Record, item: Item | BadItem, pictures: Pictures, beside: Folder | None
    ) -> None:
        if len(self._cards) >= MAX_CARDS and record.is_ok:
            return
        row = self.maker.make(record, self._found(record, item, pictures))
        self._cards.add(self.maker.key(record), row)
        self._index.add(record, len(self._index), 0)
        self._show(row, beside)

    def _found(
        self, record: Record, item: Item | BadItem, pictures: Pictures
    ) -> tuple[Picture, ...]:
        """Returns the pictures of an item, made of its bytes where it holds them."""
        if is_refused(record):
            return ()
        media = media_of(record)
        held = bytes_of(item) if isinstance(item, Item) and record.path is None else []
        data = held if len(held) == len(media) else [None] * len(media)
        return tuple(
            picture
            for own, blob in zip(media, data, strict=True)
            for picture in pictures.of(own, blob)
        )

    def _show(self, row: Row, beside: Folder | None) -> None:
        """Adds a card to the page of the run."""
        most = EMBEDDED_CARDS if beside is None else CHUNK_CARDS
        if len(self._shown) < most:
            self._shown.append(row)
        elif beside is not None:
            self._rest.append(row)
            if len(self._rest) == CHUNK_CARDS:
                self._chunks.append(write_chunk(beside, len(self._chunks) + 1, self._rest))
                self._rest = []

    def _keep(self, parent: Folder, beside: str) -> None:
        """Takes over the cards of an earlier page."""
        for key, row in read_kept(parent, self._path.name, beside):
            if len(self._cards) < MAX_CARDS:
                self._cards.add(key, row)
                if row.outcome != "failed" and len(self._shown) < CHUNK_CARDS:
                    self._shown.append(row)

    def _write(self, parent: Folder) -> None:
        """Writes the page as far as the run is."""
        page = self._page(parent, _said(self._tally))
        url = url_of(page.beside)
        chunks = [f"{url}/{name}" for name in self._chunks]
        page.write(self._shown, chunks, has_files=self.are_in_files)
        self.num_pages += 1

    def _page(self, parent: Folder, running: str) -> Page:
        num_shown = len(self._shown) + CHUNK_CARDS * len(self._chunks)
        return Page(
            parent=parent,
            name=self._path.name,
            head=self._head(running),
            index=self._index,
            num_shown=num_shown,
        )


def _said(tally: Tally | None) -> str:
    """Returns in words how far a run is."""
    if tally is None:
        return "the model is being loaded"
    moment = tally.clock.moment()
    left = "" if moment.num_left is None else f", {moment.num_left} left"
    time_left = "" if moment.seconds_left is None else f", about {duration(moment.seconds_left)}"
    return f"running: {moment.num_ended} done{left}{time_left} ({moment.per_second:.1f}/s)"
