"""Says where the pictures of a job are, beside which its sidecars are written."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from mmdeploy_llm.data.files.page_choice import PAGE_COLUMNS
from mmdeploy_llm.data.files.walk import base_path
from mmdeploy_llm.data.outputs.base import Sink
from mmdeploy_llm.data.outputs.opening.choose import check_holds
from mmdeploy_llm.data.outputs.sidecars.places import Spot
from mmdeploy_llm.data.outputs.sidecars.run import RunSidecars
from mmdeploy_llm.data.outputs.sidecars.writer import SpotOf, page_of, picture_of
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.rows.names import is_url
from mmdeploy_llm.errors import RequestError

from .file_source import FileSource
from .overlap import check_lists

if TYPE_CHECKING:
    from .settings import BatchJob, BatchSettings


def sidecars_of(job: BatchJob) -> RunSidecars:
    """Returns the sidecars of a job's run."""
    options = job.settings.sidecars
    if options is None:
        return RunSidecars(None, _spots_of(job), job.sink)
    return RunSidecars(options, _spots_of(job), job.sink, job.settings.finding.wanted().table)


def check_lists_and_sidecars(settings: BatchSettings, sink: Sink, *, is_corpus: bool) -> None:
    """Raises ConfigError for a list that would be written in the place of the output, and for a
    name in the template of sidecars that no file has a value for. What a corpus or a schema will
    have is not known before."""
    lists = {"--log-json": settings.progress.log_json, "--skipped": settings.finding.skipped}
    check_lists(lists, sink)
    check_holds(sink, vectors=settings.asks.wanted is not None)
    if settings.sidecars is not None and settings.schema is None and not is_corpus:
        of_pages = PAGE_COLUMNS if settings.finding.pages.by_page else ()
        settings.sidecars.text.check((*settings.asks.questions, *of_pages))


def _spots_of(job: BatchJob) -> SpotOf:
    """Returns what finds the picture of a record: of files, as they were found; of a corpus,
    beneath its folder; of a program's own dicts, where they say."""
    source = job.source
    if isinstance(source, FileSource):
        return source.spot_of
    folder = job.folder

    def spot_of(record: Record) -> Spot:
        if folder is not None and is_url(folder):
            raise RequestError("its input is at a URL, where no sidecars are written")
        return Spot.beneath(folder, picture_of(record), page_of(record))

    return spot_of


def folder_of(given: Any) -> str | None:
    """Returns the folder of a corpus or its URL; None for the dicts of a program."""
    if not isinstance(given, (str, os.PathLike)):
        return None
    name = os.fspath(given)
    return name if is_url(name) else base_path(name)
