"""RemoteDesk: a local desk in a process of its own, and what serves it there.

    submit --> sender thread --Submit, Abort, Call--> reader thread --> LocalDesk
    ticket <-- receiver thread <----Output, Answer--- main thread <--------'

Only threads of the desk use the channel, so Ctrl-C, which Python raises in the main thread, never
leaves half a message in it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from mmdeploy_llm.engine.intake.rendered import TokenCount
from mmdeploy_llm.engine.startup.start import start
from mmdeploy_llm.errors import EngineError, MMDeployLLMError, RequestError, WorkerDiedError
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.layers.pooling.abilities import Abilities
from mmdeploy_llm.media.boxes.reading import FoundBoxes
from mmdeploy_llm.media.loading.cache import CacheStats
from mmdeploy_llm.system.processes import (
    Channel,
    Message,
    Worker,
    finalize_here,
    without_collections,
)
from mmdeploy_llm.values.adapter_ref import AdapterRef
from mmdeploy_llm.values.deadline import Deadline
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.options.runtime_config import RuntimeConfig
from mmdeploy_llm.values.outputs.request_output import RequestOutput

from .ask import Ask
from .desk import CLOSE_SECONDS, CLOSED_MEANWHILE, Desk, DeskStats, Held
from .local import LocalDesk
from .outcome import text_of
from .ticket import Ticket

logger = logging.getLogger(__name__)

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Reports that the desk is open."""

    runtime: RuntimeConfig
    abilities: Abilities
    num_kv_blocks: int
    max_begun: int
    num_seqs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Tells the other process what to do: to call a method of its _Server."""

    method: Callable[..., None]
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One output of a ticket. error: the exception with which the desk ended it."""

    number: int
    output: RequestOutput
    error: MMDeployLLMError | None
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The result of a call. error: the exception that it raised, None otherwise."""

    number: int
    value: Any = None
    error: MMDeployLLMError | None = None


class RemoteDesk(Desk):
    """Computes prompts with an engine in another process. Its receiver thread writes the tickets,
    its sender thread sends all messages and closes the channel."""

    def __init__(
        self, config: EngineConfig, name: str = "engine", *, is_quiet: bool = False
    ) -> None:
        """Starts the process; `open` waits until it is ready."""
        super().__init__()
        self._worker = Worker(name, partial(serve_desk, config=config), is_quiet=is_quiet)
        self._outbox: SimpleQueue[Callable[[], object] | None] = SimpleQueue()  # None: end
        self._calls: dict[int, Future[Any]] = {}
        self._death: WorkerDiedError | None = None
        self._is_exiting = threading.Event()  # set before the worker's own finalizer ends it
        finalize_here(self, self._is_exiting.set)
        self._sender = threading.Thread(target=self._send_all, daemon=True)

    def open(self) -> None:
        """Waits until the engine is loaded. Raises what `start` raises there."""
        ready: Ready = self._worker.receive()
        self.runtime, self.num_kv_blocks = ready.runtime, ready.num_kv_blocks
        self.abilities = ready.abilities
        self.max_begun, self.num_seqs = ready.max_begun, ready.num_seqs
        self._sender.start()
        threading.Thread(target=self._receive_all, daemon=True).start()

    def kill(self) -> None:
        """Ends the process of a desk that nobody uses yet, open or not, and its threads."""
        self._is_closed = True
        if self._sender.is_alive():  # which closes the channel that another thread reads
            self._worker.interrupt()
            self._sender.join(2 * CLOSE_SECONDS)
        else:
            self._worker.kill()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._worker.pid

    @property
    def death(self) -> EngineError | None:
        """Why the process has ended; None while it runs."""
        return self._death

    def count_tokens(self, prompt: Any) -> TokenCount:
        """Counts prompt and media tokens; see Desk."""
        return self._call(LocalDesk.count_tokens, prompt)

    def boxes(self, prompt: Any, text: str) -> FoundBoxes:
        """Returns the boxes in an answer; see Desk."""
        return self._call(LocalDesk.boxes, prompt, text)

    def load_adapter(self, name: str, source: str) -> AdapterRef:
        """Makes an adapter known; see Desk."""
        return self._call(LocalDesk.load_adapter, name, source)

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter; see Desk."""
        self._check_unused(name)
        self._call(LocalDesk.unload_adapter, name)

    def adapters(self) -> Mapping[str, AdapterRef]:
        """Returns the adapters by name; see Desk."""
        return self._call(LocalDesk.adapters)

    def copy_tokenizer(self) -> Any:
        """Returns a copy of the tokenizer; see Desk."""
        return self._call(LocalDesk.copy_tokenizer)

    def cache_stats(self) -> Mapping[str, CacheStats]:
        """Returns the statistics of the media caches; see Desk."""
        return self._call(LocalDesk.cache_stats)

    def stats(self) -> DeskStats:
        """Returns the counters of the engine, and of the prompts that are not sent yet."""
        found = self._call(LocalDesk.stats)
        return replace(found, num_waiting=found.num_waiting + len(self._held) - self._num_begun)

    def stop(self) -> None:
        """Ends the process; see Desk."""
        self._is_closed = True
        self._worker.hang_up()

    def close(self) -> None:
        """Ends the process and waits for its end; see Desk."""
        self._home.check()
        self.stop()
        if self._sender is not threading.current_thread():
            self._sender.join(2 * CLOSE_SECONDS)

    def _begin(self, held: Held) -> None:
        ask = replace(
            held.ask, item=None, request_id=held.request_id, priority=held.priority, timeout=None
        )
        refuse = partial(self._finish, held.number)
        self._order(refuse, _Server.submit, held.number, ask, held.deadline)

    def _watch(self, held: Held) -> None:
        """Does nothing: a prompt with a deadline is sent at once, and watched there."""

    def _can_begin(self, held: Held) -> bool:
        return held.deadline is not None or super()._can_begin(held)

    def _abort_begun(self, held: Held) -> bool:
        self._order(lambda _: None, _Server.abort, held.number)
        return True

    def _post(self, task: Callable[[], object]) -> None:
        self._outbox.put(task)

    def _call(self, method: Callable[..., Value], *args: Any) -> Value:
        """Calls a method of the local desk and returns the result; raises what it raises there."""
        number, future = next(self._numbers), Future[Value]()
        self._calls[number] = future
        self.check()  # after this, the end of the process ends the call
        self._order(future.set_exception, _Server.answer, number, method, args)
        return future.result()

    def _order(
        self, refuse: Callable[[Exception], object], method: Callable[..., None], *args: Any
    ) -> None:
        """Has an order sent; calls `refuse` when it cannot be serialized."""
        self._post(partial(self._send, refuse, Order(method=method, args=args)))

    # In the sender thread.

    def _send_all(self) -> None:
        while (task := self._outbox.get()) is not None:
            task()
        self._worker.close()

    def _send(self, refuse: Callable[[Exception], object], order: Order) -> None:
        try:
            message = Message(order)
        except Exception as error:  # pickle raises whatever the objects raise
            reason = (
                "with data_parallel_size > 1 a prompt goes to another process, and this one cannot "
                f"({error_text(error)}); give texts, paths, bytes, images or arrays"
            )
            refuse(RequestError(reason))
            return
        try:
            self._worker.send_message(message)
        except WorkerDiedError:
            pass  # the receiver thread finds the end of the channel too
        finally:
            message.close()

    # In the receiver thread.

    def _receive_all(self) -> None:
        try:
            while True:
                self._take(self._worker.receive())
        except Exception as error:
            if self._is_exiting.is_set():
                return
            self._lose(error)

    def _take(self, message: Output | Answered) -> None:
        if isinstance(message, Answered):
            future = self._calls.pop(message.number)
            if message.error is None:
                future.set_result(message.value)
            else:
                future.set_exception(message.error)
            return
        held = self._held.get(message.number)
        ticket = None if held is None else held.ticket()
        if message.is_last:  # before its reader knows, as in LocalDesk
            self._finish(message.number)
        if ticket is not None:
            prompt = message.output.prompt or text_of(ticket.ask.shown)
            ticket.error = message.error
            ticket.put(replace(message.output, prompt=prompt, item=ticket.item))

    def _lose(self, error: Exception) -> None:
        """Ends all tickets and calls, once the process has ended."""
        reason = EngineError(CLOSED_MEANWHILE)
        if not self._is_closed:
            reason = self._death = WorkerDiedError(str(error))
            logger.error("an engine died with %d unfinished prompts: %s", len(self._held), error)
        self._worker.interrupt()
        self._outbox.put(None)
        self._fail_all(reason)
        while self._calls:
            self._calls.popitem()[1].set_exception(reason)


def serve_desk(channel: Channel, *, config: EngineConfig) -> None:
    """Runs a local desk in its process: receives prompts and sends outputs until the channel
    closes. Raises WorkerDiedError when the engine has died."""
    with without_collections():
        desk = LocalDesk(partial(start, config))
    _Server(channel, desk).serve()


class _Server:
    """Serves one local desk. The main thread sends, another one reads."""

    def __init__(self, channel: Channel, desk: LocalDesk) -> None:
        self._channel = channel
        self._desk = desk
        self._news: SimpleQueue[Ticket | Answered | Exception] = SimpleQueue()
        self._tickets: dict[int, Ticket] = {}

    def serve(self) -> None:
        """Sends what is new until the process ends."""
        desk = self._desk
        self._channel.send(
            Ready(
                runtime=desk.runtime,
                abilities=desk.abilities,
                num_kv_blocks=desk.num_kv_blocks,
                max_begun=desk.max_begun,
                num_seqs=desk.num_seqs,
            )
        )
        threading.Thread(target=self._read_all, daemon=True).start()
        while True:
            news = self._news.get()
            if isinstance(news, Exception):
                raise news
            if isinstance(news, Ticket):
                self._send_news(news)
            else:
                self._channel.send(news)

    def _send_news(self, ticket: Ticket) -> None:
        while (output := ticket.get_nowait()) is not None:
            if self._desk.death is not None:
                raise self._desk.death  # what is unfinished may be computed elsewhere
            error = ticket.error if isinstance(ticket.error, MMDeployLLMError) else None
            if ticket.is_over:
                self._tickets.pop(ticket.number, None)
            self._channel.send(
                Output(
                    number=ticket.number,
                    output=replace(output, item=None),  # the sender of the prompt has it
                    error=error,
                    is_last=ticket.is_over,
                )
            )

    def _read_all(self) -> None:
        while True:
            try:
                order = self._channel.receive()
            except (EOFError, OSError):
                os._exit(0)  # the parent has ended, or has closed this desk
            order.method(self, *order.args)

    def submit(self, number: int, ask: Ask, deadline: Deadline | None) -> None:
        """Hands a prompt in, with the number of the caller's ticket."""
        try:
            ticket = self._desk.submit(ask, self._news.put, number=number, deadline=deadline)
        except EngineError as error:
            self._news.put(error)
            return
        self._tickets[number] = ticket
        if ticket.is_over:  # it was sent before it was noted here
            self._tickets.pop(number, None)

    def abort(self, number: int) -> None:
        """Ends a prompt that nobody waits for any more."""
        self._desk.abort(number)

    def answer(self, number: int, method: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Calls a method of the desk, in a thread of its own, and sends the result."""
        threading.Thread(target=self._answer, args=(number, method, args), daemon=True).start()

    def _answer(self, number: int, method: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            answer = Answered(number=number, value=method(self._desk, *args))
        except MMDeployLLMError as error:
            answer = Answered(number=number, error=error)
        except Exception as error:  # raised by a plugin
            answer = Answered(number=number, error=EngineError(error_text(error)))
        self._news.put(answer)
