"""Reads documents page by page, for LLM.read."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any

from mmdeploy_llm.batch.documents.reading.plan import Reader, Wish, find_reading, open_reader
from mmdeploy_llm.batch.settings import BatchSettings
from mmdeploy_llm.batch.summary import BatchSummary
from mmdeploy_llm.values.options.config import EngineConfig

from .batches import BatchModel, informed, run_job

logger = logging.getLogger(__name__)


def read_documents(
    model: BatchModel,
    documents: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    wish: Wish,
    settings: BatchSettings,
    report: str | os.PathLike[str] | None,
    live: bool | int,
) -> BatchSummary:
    """Writes a record for each page, and Markdown if it is wished, see LLM.read."""
    is_one = isinstance(documents, (str, os.PathLike))
    several: Any = [documents] if is_one else documents
    paths = [os.fspath(own) for own in several]
    with (reader := open_reader(model.config, wish)).documents:
        _warn_of_budget(model.config, reader)
        found = find_reading(paths, informed(settings, model.config), reader, wish)
        reading = found.plan(output)

        def written(summary: BatchSummary) -> None:
            for line in (found.source.about, *reading.write(summary)):
                logger.info("%s", line)

        return run_job(model, reading.job, report, live, after=written)


def _warn_of_budget(config: EngineConfig, reader: Reader) -> None:
    """Says that a preset is made for another budget of a page, where the caller has given none."""
    is_given = "image_tokens" in config.model_fields_set
    if not is_given and reader.image_tokens not in (None, "full"):
        logger.warning(
            "the preset %s is made for LLM(image_tokens=%r), which is not given",
            reader.asking.preset.name,
            reader.image_tokens,
        )
