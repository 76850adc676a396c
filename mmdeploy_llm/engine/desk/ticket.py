"""Ticket: what a caller holds, who has handed in an Ask at a desk, until the outputs are read.

    caller -- Ask --> desk -- put --> Ticket -- get --> caller

A ticket never makes the desk wait: outputs that are not read yet are joined to one.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

from mmdeploy_llm.values.outputs.request_output import Completions, RequestOutput

from .ask import Ask
from .merge import joined, merged
from .outcome import refusal

logger = logging.getLogger(__name__)

Status = Literal["init", "context_finished", "generating", "finished", "interrupted"]


class Ticket:
    """The outputs of one Ask. The desk writes it, in one thread at a time; one reader reads it, in
    any thread. A ticket that nobody holds any more is aborted.

    number: unique in its desk.
    request_id: of all outputs.
    status: "init" until the first token, "context_finished" with it, "generating" after it, then
        "finished" or, with an error or an abort, "interrupted".
    generated_length: tokens in the outputs so far, of all completions. Without `ask.stream` tokens
        are known at the end.
    error: the exception with which the desk ended the prompt, None otherwise.
    """

    def __init__(
        self,
        ask: Ask,
        number: int,
        abort: Callable[[int], None],
        on_news: Callable[[Ticket], object] | None = None,
    ) -> None:
        """on_news: called by the desk's thread when there is something to read again, and at the
        end; must return at once."""
        self.ask = ask
        self.number = number
        self.request_id = ask.request_id or uuid.uuid4().hex
        self.status: Status = "init"
        self.generated_length = 0
        self.error: Exception | None = None
        self._abort = abort
        self._on_news = on_news
        self._changed = threading.Condition(threading.Lock())
        self._unread: dict[tuple[int, bool], list[RequestOutput]] = {}  # by completion and is_ok
        self._ended: dict[int, RequestOutput] = {}  # last outputs, by index of the completion
        self.num_requests = ask.params.n  # that the engine computes for it
        self._num_deltas = [0] * ask.params.n  # that the reader gets, by index of the completion

    @cached_property
    def item(self) -> Any:
        """The `item` of its outputs."""
        from mmdeploy_llm.media.kept import kept  # which reads pictures: not at import

        return kept(self.ask.shown)

    @property
    def is_done(self) -> bool:
        """Whether the prompt has ended."""
        return self.status in ("finished", "interrupted")

    @property
    def is_over(self) -> bool:
        """Whether the prompt has ended and all its outputs are read."""
        return self.is_done and not self._unread

    def get(self, timeout: float | None = None) -> RequestOutput | None:
        """Waits for news and returns it; None when all outputs are read. Raises TimeoutError after
        `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._unread or self.is_done, timeout):
                raise TimeoutError(f"no output within {timeout:g} s")
        return self.get_nowait()

    def get_nowait(self) -> RequestOutput | None:
        """Returns what is unread, of one completion; None when nothing is."""
        with self._changed:
            deltas = self._unread.pop(next(iter(self._unread))) if self._unread else None
        return joined(deltas) if deltas else None

    def abort(self) -> None:
        """Ends the prompt at the next step, with what it has generated. Any thread may call it."""
        self._abort(self.number)

    def put(self, output: RequestOutput) -> bool:
        """Adds an output: of one completion, or of all; returns whether the reader of a stream had
        read everything before. Called by the desk."""
        ask, ended = self.ask, self._ended
        for completion in output.outputs if output.finished else ():
            ended.setdefault(completion.index, output)
        is_last = len(ended) == self.num_requests
        if output.is_ok or not ask.stream:  # an error may repeat the tokens of earlier deltas
            self.generated_length += sum(len(each.token_ids) for each in output.outputs)
        if is_last and not ask.stream and len(output.outputs) < self.num_requests:
            output = merged([ended[index] for index in sorted(ended)])
        if output.request_id != self.request_id:
            output = replace(output, request_id=self.request_id)
        with self._changed:
            is_news = not self._unread
            if ask.stream or is_last:
                self._add(output)
            self.status = "generating" if self.generated_length > 1 else "context_finished"
            if is_last:
                is_fine = all(one.is_ok for one in ended.values())
                self.status = "finished" if is_fine else "interrupted"
            is_told = is_last or (is_news and bool(self._unread))
            self._changed.notify_all()
        if is_told:
            self._tell()
        return is_news and ask.stream

    def end(self, error: Exception) -> None:
        """Ends the completions that have not ended as errors. Called by the desk."""
        self.error = error
        for index in range(self.num_requests):
            if index not in self._ended:
                self.put(refusal(self.ask, self.request_id, index, error))

    def _add(self, output: RequestOutput) -> None:
        """Adds a delta to the unread ones of its completion. An error stays alone: its text may be
        all of the completion's text."""
        key = output.outputs.index, output.is_ok
        is_first = self.ask.stream and key not in self._unread
        self._unread.setdefault(key, []).append(self._numbered(output) if is_first else output)

    def _numbered(self, delta: RequestOutput) -> RequestOutput:
        """Returns the delta with its ordinal among those that the reader gets: joined ones count
        as one."""
        (completion,) = delta.outputs
        number = self._num_deltas[completion.index]
        self._num_deltas[completion.index] += 1
        if completion.send_idx == number:
            return delta
        return replace(delta, outputs=Completions([replace(completion, send_idx=number)]))

    def _tell(self) -> None:
        try:
            if self._on_news is not None:
                self._on_news(self)
        except BaseException:  # it must not end the engine's thread
            logger.exception("a caller could not be told about news of request %s", self.request_id)
