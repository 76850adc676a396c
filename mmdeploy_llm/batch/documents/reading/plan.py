"""Plans the reading of documents: what is asked, which pages there are, what is written."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdeploy_llm.batch.documents.documents import IMAGE, Documents
from mmdeploy_llm.batch.documents.pages import TextLayers, find_pages
from mmdeploy_llm.batch.documents.source import PageSource
from mmdeploy_llm.batch.job import plan_source
from mmdeploy_llm.batch.settings import BatchJob, BatchSettings
from mmdeploy_llm.data.files.chosen_kinds import ChosenKinds
from mmdeploy_llm.data.files.files import find_media
from mmdeploy_llm.data.files.options import FindingOptions
from mmdeploy_llm.data.outputs.base import Sink
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.media.documents.page_ranges import parse_pages
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.text.display import listed
from mmdeploy_llm.weights.folder import PROMPT_FILES, look_up

from .asking import Asking, check_asking, choose_asking
from .finishing import Finishing
from .folder import check_folder, newest_records, remove_documents, write_folder

if TYPE_CHECKING:
    from mmdeploy_llm.batch.summary import BatchSummary
    from mmdeploy_llm.engine.startup.model_files import ModelFiles
    from mmdeploy_llm.media.documents.upright import UprightFinder


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Says how a caller wants documents to be read; None leaves it to the preset.

    preset, task, prompt, tables: see choose_asking. options: of documents. pages: see find_pages.
    sampling: values of SamplingParams. markdown: the folder for Markdown. is_marked: whether
    running headers and footers are marked in documents.
    """

    preset: str | None = None
    task: str | None = None
    prompt: str | None = None
    tables: str | None = None
    pages: str | None = None
    options: Mapping[str, Any]
    sampling: Mapping[str, Any]
    markdown: Path | None = None
    is_marked: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A model that reads. documents: opens what it reads; to be closed."""

    asking: Asking
    documents: Documents

    @property
    def image_tokens(self) -> int | str | None:
        """The budget of a page that the preset asks for."""
        return self.asking.preset.image_tokens

    def sampling_params(self, wish: Wish) -> SamplingParams:
        """Returns the parameters of answers: the caller's, else the preset's, else greedy ones."""
        preset = self.asking.preset
        values: dict[str, Any] = {"max_tokens": preset.max_tokens, **preset.sampling}
        guards = {"no_repeat_ngram", "no_repeat_ngram_size"}
        if guards & wish.sampling.keys():
            values = {name: value for name, value in values.items() if name not in guards}
        values.update(wish.sampling)
        is_drawn = any(name in values for name in ("top_p", "top_k", "min_p", "n"))
        return SamplingParams(**{**({} if is_drawn else {"temperature": 0.0}), **values})


def open_reader(config: EngineConfig, wish: Wish) -> Reader:
    """Reads a model's files, not its weights, and chooses how it is asked. Raises ConfigError,
    ModelError, PluginError."""
    look_up(config, PROMPT_FILES)
    if wish.pages is not None:
        parse_pages(wish.pages, 1, is_strict=False)
    if wish.preset is not None or wish.task is not None:
        check_asking(PluginManager.of(config), wish.preset, wish.task, wish.prompt)
    from mmdeploy_llm.engine.startup.model_files import read_model_files  # which imports torch

    files = read_model_files(config, PROMPT_FILES)
    _check_model(files, config.model)
    asking = choose_asking(
        files, wish.preset, wish.task, wish.prompt, wish.tables, wish.options, config.model
    )
    return Reader(asking=asking, documents=Documents.of(files, config))


def _check_model(files: ModelFiles, name: str) -> None:
    """Raises ConfigError for a model that can read no page: one that takes no pictures, or that
    gives vectors."""
    spec = files.spec
    if files.plugins.media_processor(IMAGE, spec.name) is None:
        raise ConfigError(
            f"{name} takes no pictures and cannot read documents, whose pages are pictures; give a "
            "model that takes them"
        )
    is_embedder = getattr(files.plugins.resolve(spec), "is_embedder", False)
    if is_embedder or spec.vectors is not None:
        raise ConfigError(
            f"{name} gives vectors and writes no text, so it cannot read documents; `embed` makes "
            "vectors of them"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingJob:
    """A job whose items are pages. source: of its items. finishing: counts what it tells of
    answers."""

    job: BatchJob
    source: PageSource
    wish: Wish
    finishing: Finishing

    def write(self, summary: BatchSummary) -> list[str]:
        """Writes the Markdown, if it is wanted; returns what is told of it and of answers."""
        told = [f"  {num} x {note}" for note, num in self.finishing.counts.most_common()]
        told = ["notes on answers (in the records):", *told] if told else []
        folder = self.wish.markdown
        if folder is None or not summary.sink.exists():
            return told
        records = newest_records(summary.sink, self.source.rank_of)
        counts = write_folder(folder, records, is_marked=self.wish.is_marked)
        if summary.num_pruned:
            remove_documents(folder, self.source.unlisted(self.job.gone), counts)
        return [*told, *counts.lines(folder)]


def wanted_of(finding: FindingOptions, documents: Documents) -> ChosenKinds:
    """Returns the kinds that are read. Raises ConfigError for a chosen one that has no pages."""
    takes = listed(documents.kinds, "and")
    wrong = [kind for kind in finding.kinds if kind not in documents.kinds]
    if wrong:
        raise ConfigError(f"{wrong[0]} is not read page by page; kinds that are: {takes}")
    if finding.kinds:
        return ChosenKinds(table=documents.table, chosen=finding.kinds)
    reason, hint = f"it has no pages; `read` takes {takes}", f"`read` takes {takes}"
    return ChosenKinds(table=documents.table, chosen=documents.kinds, leaves_out=(reason, hint))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Documents that were found, and how their pages are asked about; settings: of their batch."""

    source: PageSource
    settings: BatchSettings
    wish: Wish
    finishing: Finishing

    def plan(self, output: str | os.PathLike[str] | Sink) -> ReadingJob:
        """Plans the batch over the pages. Raises ConfigError."""
        if self.wish.markdown is not None:
            # Other shards write there too.
            is_new = self.settings.mode == "new" and self.settings.selection.num_shards == 1
            check_folder(self.wish.markdown, is_new=is_new)
        job = plan_source(self.source, output, self.settings)
        return ReadingJob(job=job, source=self.source, wish=self.wish, finishing=self.finishing)


def _finder() -> UprightFinder:
    from mmdeploy_llm.media.documents.upright import UprightFinder  # which imports Pillow

    return UprightFinder()


def find_reading(
    paths: Sequence[str], settings: BatchSettings, reader: Reader, wish: Wish
) -> Reading:
    """Finds the documents and their pages. Raises ConfigError."""
    documents, asking = reader.documents, reader.asking
    found = find_media(
        paths,
        is_recursive=settings.is_recursive,
        exclude=settings.finding.exclude,
        animated=settings.finding.how_animated,
        wanted=wanted_of(settings.finding, documents),
    )
    pages = find_pages(found.files, documents, asking.options, wish.pages, documents.kinds)
    if not pages.files:
        raise ConfigError("; ".join(pages.notes) or "the documents have no pages")
    finishing, describe = Finishing(asking), settings.describe_engine
    values = asking.configuration()

    def describe_all() -> Any:
        engine = describe()
        return replace(engine, values={**engine.values, **values})

    settings = replace(
        settings,
        sampling_params=reader.sampling_params(wish),
        finish=finishing,
        describe_engine=describe_all,
    )
    source = PageSource(
        found,
        settings.sampling_params,
        settings.selection,
        pages=pages,
        documents=documents,
        options=asking.options,
        kinds=documents.kinds,
        more=asking.about,
        question=asking.prompt,
        system=asking.preset.system,
        template_kwargs=settings.chat_template_kwargs,
        text_of=TextLayers(lambda: documents, asking.options).of,
        finder=_finder() if asking.options.get("upright") == "auto" else None,
    )
    return Reading(source=source, settings=settings, wish=wish, finishing=finishing)
