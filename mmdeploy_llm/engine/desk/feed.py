"""Feed: takes prompts from an iterable as a desk has room for them, and yields their answers."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from queue import SimpleQueue

from mmdeploy_llm.errors import EngineError

from .ask import Ask
from .desk import CLOSED_MEANWHILE, Desk
from .outcome import Answer
from .ticket import Ticket


class Feed:
    """One call of a caller, used by one thread. It holds at most max_begun tickets of the desk, so
    that memory does not depend on the number of prompts; tickets of a feed that is dropped are
    aborted."""

    def __init__(self, desk: Desk, asks: Iterable[Ask]) -> None:
        """Raises EngineError when the desk is closed, and in a forked process."""
        desk.check_open()
        self._desk = desk
        self._asks = iter(asks)
        self._is_open = True
        self._tickets: dict[int, Ticket] = {}  # by number
        self._news: SimpleQueue[int] = SimpleQueue()  # numbers of tickets with something to read

    def fill(self) -> None:
        """Hands in prompts while there is room; none once the engine has died."""
        put = self._news.put
        while self._is_open and len(self._tickets) < self._desk.max_begun:
            ask = None if self._desk.death else next(self._asks, None)
            if ask is None:
                self._is_open = False
                return
            try:
                ticket = self._desk.submit(ask, lambda ticket: put(ticket.number))
            except EngineError:
                self._desk.check_open(CLOSED_MEANWHILE)
                self._is_open = False  # it has just died
                return
            self._tickets[ticket.number] = ticket

    def answers(self) -> Generator[Answer, None, None]:
        """Yields answers as they come; closing it aborts what is left. After those of an engine
        that has died, its error is raised; EngineError when the desk is closed or forked."""
        try:
            while self._is_open or self._tickets:
                self._desk.check_open(CLOSED_MEANWHILE)
                self.fill()
                if self._tickets:
                    yield from self._read(self._news.get())
            self._desk.check()
        finally:
            for ticket in self._tickets.values():
                ticket.abort()

    def _read(self, number: int) -> Generator[Answer, None, None]:
        """Yields what is unread of a ticket."""
        ticket = self._tickets.get(number)
        while ticket is not None and (output := ticket.get_nowait()) is not None:
            self._desk.check_open(CLOSED_MEANWHILE)
            if ticket.is_over:
                del self._tickets[number]
            yield Answer(ask=ticket.ask, output=output, error=ticket.error)
