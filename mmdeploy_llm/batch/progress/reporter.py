"""Reports the events of a run: all to a log, and a line now and then to stderr."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from mmdeploy_llm.data.records.outcome import counted
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.values.text.display import duration
from mmdeploy_llm.values.text.progress_bars import UseTqdm, in_notebook

from .log import EventLog

Tell = Callable[..., None]  # tell(event, **values)
Progress = Callable[[], Mapping[str, Any]]  # the values of an event "progress"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressOptions:
    """How the progress of a run is reported.

    log_json: file of its log of events; None: no log. seconds: between two lines, and between two
    events "progress".
    """

    log_json: str | os.PathLike[str] | None = None
    seconds: float = 30.0

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ConfigError(f"the seconds between two lines must be positive: {self.seconds}")


def silent(event: str, **values: Any) -> None:
    """Tells nothing: for those that nobody hears."""


class ProgressReporter:
    """Reports the events of one run. A context manager: its end tells how the run ended, if that
    has not been told.

    use_tqdm: None: lines where no progress bar is seen; else none, since there is one, or nothing
    is wanted. about: values of every event.
    """

    def __init__(
        self,
        options: ProgressOptions,
        *,
        use_tqdm: UseTqdm | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self._log = None if options.log_json is None else EventLog(options.log_json)
        self._has_lines = use_tqdm is None and not (_is_terminal() or in_notebook())
        self._seconds, self._about = options.seconds, dict(about or {})
        self._begin = time.perf_counter()
        self._progress: Progress | None = None
        self._is_over = threading.Event()
        self._is_finished = False
        self._thread = threading.Thread(target=self._repeat, name="progress", daemon=True)

    def __enter__(self) -> ProgressReporter:
        if self._has_lines or self._log is not None:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()
        if not self._is_finished:
            is_stopped = isinstance(error, KeyboardInterrupt)
            ending = "interrupted" if is_stopped else "error"
            self.tell("finished", ending=ending, error=str(error) or type(error).__name__)
        if self._log is not None:
            self._log.close()

    def tell(self, event: str, **values: Any) -> None:
        """Tells an event; may be called from any thread."""
        self._is_finished = self._is_finished or event == "finished"
        if self._log is not None:
            elapsed = round(time.perf_counter() - self._begin, 3)
            self._log.write(event, {"elapsed": elapsed, **self._about, **values})

    def watch(self, progress: Progress) -> None:
        """Has the progress told from now on, by lines and by events."""
        self._progress = progress

    def _repeat(self) -> None:
        while not self._is_over.wait(self._seconds):
            values = {} if self._progress is None else self._progress()
            if values:
                self.tell("progress", **values)
            if self._has_lines:
                elapsed = time.perf_counter() - self._begin
                _say(line_of(values) if values else f"loading, {duration(elapsed)} so far")


def line_of(values: Mapping[str, Any]) -> str:
    """Returns the line of an event "progress"."""
    parts = [f"{values['num_done']} done", f"{values['num_failed']} failed"]
    parts += counted(values["outcomes"])
    if values["num_left"] is not None:
        parts.append(f"{values['num_left']} left")
    unit, speed = values["unit"], values["items_per_second"]
    rates = f"{speed:.2f} {unit}s/s, {values['tokens_per_second']:.0f} tokens/s"
    left = values["seconds_left"]
    return f"{', '.join(parts)}; {rates}" + ("" if left is None else f"; {duration(left)} to go")


def _is_terminal() -> bool:
    """Returns whether stderr is a terminal that shows a progress bar, which one without columns,
    such as that of a container, does not; True where there is no stderr at all."""
    try:
        if sys.stderr is None or not sys.stderr.isatty():
            return sys.stderr is None
        return os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except (OSError, ValueError):  # it is closed, or has no descriptor
        return True


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads stderr any more
        print(line, file=sys.stderr, flush=True)
