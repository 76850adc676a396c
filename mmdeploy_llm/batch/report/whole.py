"""RunReport: the report of a run from its beginning to its end."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mmdeploy_llm.batch.job import run_batch
from mmdeploy_llm.batch.report.nearest import strips_of
from mmdeploy_llm.batch.settings import BatchJob, OpenLLM
from mmdeploy_llm.batch.summary import BatchSummary
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.system.guarding.claims import claimed

from .growing import GrowingReport
from .live import LiveReport
from .page import head_of, report_batch
from .pictures import Strips
from .previews import FilePreviews
from .target import check_page


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Holds what a report says besides the records, and where it is served.

    about: further settings to list. live_port: where it is served while the run goes on, 0 for a
    free port; None: nowhere.
    """

    model: str
    about: Mapping[str, Any]
    is_caption: bool = False
    live_port: int | None = None


class RunReport:
    """Writes the report of a job while it runs. Raises ConfigError when the page cannot be written
    or the port not be had.

    job: the one to run. url: of the live page; None without one.
    """

    def __init__(
        self, job: BatchJob, page: Path, previews: FilePreviews, options: ReportOptions
    ) -> None:
        check_page(page)
        with ExitStack() as stack:
            stack.enter_context(claimed(page))
            self._begin(job, page, previews, options)
            self._claim = stack.pop_all()

    def _begin(
        self, job: BatchJob, page: Path, previews: FilePreviews, options: ReportOptions
    ) -> None:
        self._page, self._previews, self._options = page, previews, options
        settings = job.settings
        self._kinds = tuple(dict.fromkeys(job.source.kinds().values()))
        head = partial(
            head_of,
            settings,
            options.model,
            options.about,
            is_caption=options.is_caption,
            kinds=self._kinds,
        )
        self._growing = GrowingReport(
            page,
            lambda running: head(running=running),
            previews,
            total=job.source.total,
            is_resumed=settings.mode == "resume",
        )
        self.job = replace(job, settings=replace(settings, watch=self._growing))
        port = options.live_port
        self._live = None if port is None else LiveReport(page, self._growing.state, port)
        self.url = None if self._live is None else self._live.url

    def run(self, open_llm: OpenLLM) -> BatchSummary:
        """Runs the job. Raises as run_batch does."""
        try:
            return run_batch(self.job, open_llm)
        except BaseException:
            self.close()
            raise

    def write(self, summary: BatchSummary) -> None:
        """Writes the page of the run that has ended. One that was interrupted is not waited for:
        pictures that are not there are made by the next run. Raises as write_report does."""
        with self._claim:
            self._stop(is_hurried=summary.ending == "interrupted")
            self._write(summary)

    def _write(self, summary: BatchSummary) -> None:
        strips, facts = self._near(summary)
        if summary.num_records:
            report_batch(
                summary,
                self._page,
                self.job.settings,
                model=self._options.model,
                previews=self._previews,
                about=self._options.about,
                is_caption=self._options.is_caption,
                kinds=self._kinds,
                made=self._growing,
                strips=strips,
                facts=facts,
            )

    def _near(self, summary: BatchSummary) -> tuple[Strips, dict[str, str]]:
        """Returns the nearest neighbours of some items of an output of vectors, or why there are
        none."""
        settings = self.job.settings
        if settings.asks.wanted is None or summary.ending == "interrupted":
            return (), {}
        try:
            return strips_of(summary.sink.name, settings.finding.wanted().table), {}
        except ConfigError as error:  # such as vectors of two sizes
            return (), {"nearest neighbours": str(error)}

    def close(self) -> None:
        """Ends what runs beside the run."""
        with self._claim:
            self._stop(is_hurried=True)

    def _stop(self, *, is_hurried: bool) -> None:
        self._growing.finish(is_hurried=is_hurried)
        if self._live is not None:
            self._live.close()
            self._live = None
