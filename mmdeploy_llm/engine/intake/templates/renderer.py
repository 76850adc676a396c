"""Renders chat templates in a process that can be killed.

    Renderer --Helper--> serve() --> sandbox.py         another process, with limits of the system
      template, variables (pickled) -->   <-- b"T" text | b"E" error | b"L" late | b"M" memory

What comes back is bytes and is never unpickled: the process runs the programs of strangers. It has
limits for memory and processor time, which hold for compiling too. It starts when it is first
needed, loads no torch, and is killed when it does not answer in time; the next call starts another.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Any

from mmdeploy_llm.errors import RequestError, WorkerDiedError
from mmdeploy_llm.system.portable.limits import set_limit
from mmdeploy_llm.system.processes.helper import Helper
from mmdeploy_llm.system.processes.process import Channel
from mmdeploy_llm.values.text.display import error_text

from .sandbox import TemplateTimeError, run

GRACE_SECONDS = 0.25  # for an answer after the deadline, which the process observes itself
MAX_MEMORY = 2**30  # bytes of address space of the process
MAX_ANSWER = 2**28  # bytes


class TemplateFailedError(Exception):
    """The template raised an error in the process; the message is that of the error."""


class Renderer:
    """Renders templates; at most one process, which several threads use one after the other."""

    def __init__(self, max_memory: int = MAX_MEMORY) -> None:
        self._max_memory = max_memory
        self._lock = threading.Lock()  # held during the calls for one template
        self._helper = Helper("template", serve, max_memory, MAX_ANSWER)

    def render(self, template: str, variables: dict[str, Any], seconds: float) -> str:
        """Renders the template with plain values.

        Raises TemplateTimeError after `seconds`, TemplateFailedError or any exception that the
        template raises, RequestError when it used too much memory or crashed the process.
        """
        with self._lock:
            return self._rendered(template, variables, seconds)

    def interrupt(self) -> None:
        """Ends a call that is under way and refuses later ones; may be called from any thread."""
        self._helper.interrupt()

    def close(self) -> None:
        """Ends the process."""
        self._helper.close()

    def _rendered(self, template: str, variables: dict[str, Any], seconds: float) -> str:
        is_fresh, begin = not self._helper.is_running, time.monotonic()
        kind, text = self._call((template, variables, seconds))
        seconds -= time.monotonic() - begin
        if kind == b"M" and not is_fresh:  # what earlier calls left may have been in the way
            kind, text = self._call((template, variables, max(0.0, seconds)))
        match kind:
            case b"T":
                return text
            case b"E":
                raise TemplateFailedError(text)
            case b"L":
                raise TemplateTimeError(text)
        raise RequestError(
            f"the chat template needs more than {self._max_memory >> 20} MiB to render these "
            "messages; give another chat_template or shorter messages"
        )

    def _call(self, job: tuple[str, dict[str, Any], float]) -> tuple[bytes, str]:
        """Returns the answer of the process, which is ended where it was late or out of memory."""
        try:
            answer = self._helper.call(job, job[2] + GRACE_SECONDS)
        except TimeoutError:
            raise TemplateTimeError("its time is up") from None
        except WorkerDiedError:
            raise RequestError(
                "the chat template ended the process that rendered it; give another chat_template"
            ) from None
        if answer[:1] not in (b"T", b"E"):
            self._helper.end_child()
        return answer[:1], answer[1:].decode("utf-8", "surrogatepass")


def serve(channel: Channel) -> None:
    """Runs in the process: renders what comes until the channel closes."""
    max_memory = channel.receive()
    channel.ready()
    while True:
        template, variables, seconds = channel.receive()
        _limit(seconds, max_memory)
        try:
            answer = b"T" + run(template, variables, seconds).encode("utf-8", "surrogatepass")
        except TemplateTimeError:
            answer = b"L"
        except MemoryError:
            answer = b"M"
        except Exception as error:  # a template is a program and may raise anything
            answer = b"E" + error_text(error).encode("utf-8", "surrogatepass")
        channel.answer(answer if len(answer) <= MAX_ANSWER else b"M")


def _limit(seconds: float, max_memory: int) -> None:
    """Limits this process: memory, and processor time for this call, so that it also ends when the
    parent is gone and a single operation holds the interpreter."""
    set_limit("memory", max_memory)
    set_limit("seconds", math.ceil(time.process_time() + seconds) + 2)
    set_limit("core", 0)
