"""Handle: one request of an AsyncLLM, read from threads or from tasks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from typing import Any, Self

from mmdeploy_llm.engine.desk.merge import joined, merged
from mmdeploy_llm.engine.desk.ticket import Status, Ticket
from mmdeploy_llm.values.outputs.request_output import RequestOutput

from .stats import RequestStats

MAX_PIECES = 64  # deltas that are kept singly


class News:
    """Tells threads and tasks that wait for a request that it has changed. It does not refer to the
    handle, which is collected when its holder forgets it.

    Writers: the desk's thread and those who wait, under the lock of `_changed`.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[asyncio.Future[None]] = []

    def __call__(self, ticket: Ticket) -> None:
        """Wakes everybody who waits; called by the desk's thread."""
        with self._changed:
            self._changed.notify_all()
            waiting, self._waiting = self._waiting, []
        for future in waiting:
            with suppress(RuntimeError):  # its event loop is closed
                future.get_loop().call_soon_threadsafe(_wake, future)

    def wait_for(self, is_enough: Callable[[], bool], timeout: float | None) -> bool:
        """Waits until a change makes it true. Returns False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(is_enough, timeout)

    def next(self) -> asyncio.Future[None]:
        """Returns a future of the running event loop that is done at the next change."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._changed:
            self._waiting = [each for each in self._waiting if not each.done()]
            self._waiting.append(future)
        return future


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Handle:
    """One request. It is computed whether it is read or not. `get`, `get_nowait` and iteration,
    with `for` or `async for`, return what a completion has since the last of them, as one delta.

    One thread or task reads it at a time; another one gets RuntimeError. Any number may wait for
    the whole output, by `result` or `await`, which takes nothing from the reader. The request is
    aborted when a task that waits is cancelled, and when the handle is collected before the end.

    An error of the request is in its output, see RequestOutput; nothing is raised for it.
    """

    def __init__(self, ticket: Ticket, news: News, owner: object) -> None:
        """owner: of the desk, which runs as long as a handle is held."""
        self._owner = owner
        self._ticket = ticket
        self._news = news
        self._lock = threading.Lock()  # of the two lists
        self._unread: dict[int, list[RequestOutput]] = {}  # by completion
        self._read = _Read()
        self._is_released = False
        self._reading = threading.Lock()  # held by the reader

    def __repr__(self) -> str:
        return (
            f"Handle({self.request_id!r}, {self.status}, {self.generated_length} tokens so far; "
            "read it with `for`, `async for`, result() or `await`)"
        )

    @property
    def request_id(self) -> str:
        """The request's id, as in its outputs."""
        return self._ticket.request_id

    @property
    def status(self) -> Status:
        """DashInfer's states: "init" until the first token, "context_finished" with it,
        "generating" after it, then "finished", or "interrupted" by an error or an abort."""
        return self._ticket.status

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended, for whatever reason."""
        return self._ticket.is_done

    @property
    def generated_length(self) -> int:
        """Tokens generated so far, of all completions."""
        return self._ticket.generated_length

    @property
    def stats(self) -> RequestStats:
        """Timings and counts so far."""
        output = self.so_far()
        return RequestStats() if output is None else RequestStats.of(output)

    def get(self, timeout: float | None = None) -> RequestOutput | None:
        """Waits for something new and returns it; None after the last delta. timeout: seconds,
        after which TimeoutError is raised."""
        delta = None

        def has_news() -> bool:
            nonlocal delta
            is_last = self._ticket.is_done
            delta = self._take()
            return is_last or delta is not None

        with self._one_reader():
            if not self._news.wait_for(has_news, timeout):
                raise TimeoutError(f"request {self.request_id} has nothing new in {timeout:g} s")
            return delta

    def get_nowait(self) -> RequestOutput | None:
        """Returns what is new, None if nothing is."""
        with self._one_reader():
            return self._take()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end. Returns False after `timeout` seconds."""
        return self._news.wait_for(lambda: self._ticket.is_done, timeout)

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Waits for the end and returns the whole output. timeout: seconds, after which
        TimeoutError is raised; the request goes on."""
        if not self.wait(timeout):
            raise TimeoutError(f"request {self.request_id} has not ended within {timeout:g} s")
        return self._whole()

    def so_far(self) -> RequestOutput | None:
        """Returns the whole output up to now; None before the first token."""
        with self._lock:
            self._pull()
            deltas = [*self._read.all(), *chain.from_iterable(self._unread.values())]
        return whole_of(by_completion(deltas), self._ticket.ask.params.n) if deltas else None

    def abort(self) -> None:
        """Ends the request at the next step; what was generated stays readable. Does nothing for
        one that has ended."""
        self._ticket.abort()

    def release(self) -> None:
        """Aborts the request if it has not ended and drops its output: nothing can be read any
        more. Forgetting the handle does the same."""
        self._ticket.abort()
        with self._lock:
            self._pull()
            self._is_released = True
            self._read, self._unread = _Read(), {}

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RequestOutput:
        delta = self.get()
        if delta is None:
            raise StopIteration
        return delta

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        with self._one_reader():
            while True:
                change = self._news.next()  # before the look, so that none is missed
                is_last = self._ticket.is_done
                delta = self._take()
                if delta is not None:
                    return delta
                if is_last:
                    raise StopAsyncIteration
                await self._wait_for(change)

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._end().__await__()

    async def _end(self) -> RequestOutput:
        while True:
            change = self._news.next()
            if self._ticket.is_done:
                return self._whole()
            await self._wait_for(change)

    async def _wait_for(self, change: asyncio.Future[None]) -> None:
        try:
            await change
        except asyncio.CancelledError:
            self.abort()
            raise

    @contextmanager
    def _one_reader(self) -> Iterator[None]:
        if not self._reading.acquire(blocking=False):
            raise RuntimeError(
                f"request {self.request_id} is being read by another thread or task; give each "
                "handle one reader, or wait for the whole output with result() or await"
            )
        try:
            yield
        finally:
            self._reading.release()

    def _take(self) -> RequestOutput | None:
        """Returns all that the reader does not have of one completion; None if there is nothing."""
        with self._lock:
            self._pull()
            if not self._unread:
                return None
            taken = self._unread.pop(next(iter(self._unread)))
            self._read.add(taken)
        return _joined(taken)

    def _pull(self) -> None:
        while not self._is_released and (delta := self._ticket.get_nowait()) is not None:
            self._unread.setdefault(delta.outputs.index, []).append(delta)

    def _whole(self) -> RequestOutput:
        output = self.so_far()
        if output is None:
            raise RuntimeError(f"request {self.request_id} was released; its output is gone")
        return output


class _Read:
    """Keeps the deltas that were read. Joined ones are joined again with one before them that is
    not longer, so that no token is copied often, and few remain. Writer: the handle that owns it,
    under its lock."""

    def __init__(self) -> None:
        self._single: list[RequestOutput] = []
        self._joined: dict[int, list[RequestOutput]] = {}  # by completion

    def all(self) -> list[RequestOutput]:
        """Returns all deltas, those of a completion in order."""
        return [*chain.from_iterable(self._joined.values()), *self._single]

    def add(self, deltas: Sequence[RequestOutput]) -> None:
        """Adds the next deltas of a completion."""
        self._single += deltas
        if len(self._single) <= MAX_PIECES:
            return
        for piece in by_completion(each for each in self._single if each.is_ok):
            own = self._joined.setdefault(piece.outputs.index, [])
            while own and len(own[-1].outputs.token_ids) <= len(piece.outputs.token_ids):
                piece = joined([own.pop(), piece])
            own.append(piece)
        # An error, the last of its completion, may repeat all of it.
        self._single = [each for each in self._single if not each.is_ok]


def by_completion(deltas: Iterable[RequestOutput]) -> list[RequestOutput]:
    """Joins the deltas of each completion; sorted by index."""
    each: dict[int, list[RequestOutput]] = {}
    for delta in deltas:
        each.setdefault(delta.outputs.index, []).append(delta)
    return [_joined(each[index]) for index in sorted(each)]


def whole_of(each: Sequence[RequestOutput], count: int) -> RequestOutput:
    """Returns the output of a prompt from those of its completions. count: of them at the end."""
    is_last = len(each) == count and all(one.finished for one in each)
    return replace(merged(each), finished=is_last)


def _joined(deltas: Iterable[RequestOutput]) -> RequestOutput:
    """Joins deltas; a failed parser's last one repeats all tokens and stands alone."""
    kept: list[RequestOutput] = []
    for delta in deltas:
        if not delta.is_ok and _repeats(kept, delta):
            kept = []
        kept.append(delta)
    return joined(kept)


def _repeats(deltas: Sequence[RequestOutput], last: RequestOutput) -> bool:
    before = [token_id for delta in deltas for token_id in delta.outputs.token_ids]
    after = last.outputs.token_ids
    return len(after) > len(before) and after[: len(before)] == before
