"""Writes the page of the items that an estimate answered."""

from __future__ import annotations

import datetime
from importlib import metadata
from pathlib import Path

from mmdeploy_llm.batch.report.page import ReportHead, write_report
from mmdeploy_llm.batch.report.previews import MakePreviews
from mmdeploy_llm.batch.report.target import check_page
from mmdeploy_llm.batch.settings import BatchSettings
from mmdeploy_llm.data.outputs.scan import RecordIndex

from .result import Estimate

SUFFIX = ".estimate.html"


def beside(page: str | None) -> Path | None:
    """Returns the file beside a report; None without one. Raises ConfigError as check_page does."""
    if page is None:
        return None
    target = Path(page).with_suffix(SUFFIX)
    check_page(target)
    return target


def write_page(
    target: Path, found: Estimate, model: str, settings: BatchSettings, make: MakePreviews
) -> None:
    """Writes the report of the sample, with what is estimated at its top."""
    index = RecordIndex()
    for place, record in enumerate(found.records):
        index.add(record, place, 0)
    head = ReportHead(
        model=model,
        prompt=settings.question,
        created=f"{datetime.datetime.now():%d %B %Y, %H:%M}",
        version=metadata.version("mmdeploy-llm"),
        unit=found.unit,
        facts=found.lines(),
    )
    write_report(target, found.records, head, index, make, num_shown=len(found.records))
