"""BulkClient: LLM's methods for whole batches, whose items are read and written one by one.

They import what a batch needs when they are called, so that importing LLM is quick.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from mmdeploy_llm.batch.answers import VALIDATE_RETRIES
from mmdeploy_llm.batch.arguments import BatchOptions
from mmdeploy_llm.batch.documents.reading.options import ReadArguments
from mmdeploy_llm.batch.estimate import NUM_ITEMS
from mmdeploy_llm.client.answering import AnsweringClient, Progress
from mmdeploy_llm.client.arguments import (
    as_prompt,
    as_prompts,
    is_conversation,
    one_params,
    params_for,
)
from mmdeploy_llm.engine.desk.ask import Ask
from mmdeploy_llm.engine.desk.outcome import Answer
from mmdeploy_llm.errors import ConfigError, InvalidAnswerError
from mmdeploy_llm.messages import Conversation, Prompts
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.text.progress_bars import UseTqdm, where_seen
from mmdeploy_llm.values.text.signatures import takes

if TYPE_CHECKING:
    from mmdeploy_llm.batch.answers.schemas import AnswerSchema
    from mmdeploy_llm.batch.documents.reading.plan import Reader
    from mmdeploy_llm.batch.documents.sources import Sources
    from mmdeploy_llm.batch.estimate.result import Estimate
    from mmdeploy_llm.batch.settings import BatchJob, BatchSettings
    from mmdeploy_llm.batch.summary import BatchSummary

logger = logging.getLogger(__name__)


class BulkClient(AnsweringClient):
    """Base of LLM."""

    @takes(BatchOptions)
    def run_batch(
        self,
        input: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
        output: str | os.PathLike[str],
        *,
        resume: bool | Literal["anyway"] = False,
        overwrite: bool = False,
        retry_failed: bool | Collection[int | str] | str = True,
        prompt: str | None = None,
        sampling_params: SamplingParams | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        report: str | os.PathLike[str] | None = None,
        live: bool | int = False,
        use_tqdm: UseTqdm = True,
        **options: Unpack[BatchOptions],
    ) -> BatchSummary:
        """Answers a whole batch and adds each result to `output` as it finishes: a line of a JSONL
        file, or by its suffix or URL an item of a part.

        input: a folder of images, videos and other media (`prompt` is asked about each), a corpus
        in one of the formats of docs/corpus.md, or an iterable of dicts with the keys of a JSONL
        line, read lazily; media paths in a file are relative to its folder.
        options: see BatchOptions. Of a corpus `prompt` may name columns too: "Describe {title}."
        sampling_params, chat_template_kwargs: used where a line has none of its own.
        resume: keep the output; answer items that are missing, have changed or, with retry_failed,
        failed: True for all of these, or error codes and outcomes, such as [408, "empty"].
        "anyway": also if other results are of another model or of other parameters.
        overwrite: replace the output, which otherwise must not exist. report: an HTML page.
        live: serve it on 127.0.0.1 meanwhile, at this port or, True, a free one, which is logged.
        Raises ConfigError for a wrong call, and when the output is lost, OutputLostError or
        OutputWriteError, which say how to continue; an item with an error becomes a line with it.
        Ctrl-C raises KeyboardInterrupt once the output is closed; resume=True then continues.
        """
        from mmdeploy_llm.batch.documents.sources import Sources
        from mmdeploy_llm.batch.job import plan_batch
        from mmdeploy_llm.batch.options import option_settings

        settings = self._settings(
            resume,
            overwrite,
            retry_failed,
            chat_template_kwargs,
            use_tqdm,
            sampling_params=one_params(sampling_params),
            question=prompt,
            **option_settings(options),
        )
        with Sources(self._config, settings.finding.pages) as sources:
            job = plan_batch(input, output, self._informed(settings, sources))
            return self._batch(job, report, live)

    @takes(ReadArguments)
    def read(
        self,
        documents: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        output: str | os.PathLike[str],
        *,
        markdown: str | os.PathLike[str] | None = None,
        resume: bool | Literal["anyway"] = False,
        overwrite: bool = False,
        retry_failed: bool | Collection[int | str] | str = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        report: str | os.PathLike[str] | None = None,
        live: bool | int = False,
        use_tqdm: UseTqdm = True,
        **options: Unpack[ReadArguments],
    ) -> BatchSummary:
        """Reads documents page by page, as the command `read`: a record for each page in `output`,
        and Markdown in the folder `markdown`, if one is named.

        documents: a file, folder or glob, or several. options: see ReadArguments; other arguments
        are those of run_batch, and so are the errors. The budget of a page is the engine's
        `image_tokens`. What is told of the Markdown is logged.
        """
        from mmdeploy_llm.batch.documents.reading.arguments import read_arguments
        from mmdeploy_llm.batch.documents.reading.plan import find_reading
        from mmdeploy_llm.batch.documents.reading.plan import open_reader as pages_reader

        wish, fields = read_arguments(options, markdown if markdown is None else Path(markdown))
        settings = self._settings(
            resume, overwrite, retry_failed, chat_template_kwargs, use_tqdm, **fields
        )
        is_one = isinstance(documents, (str, os.PathLike))
        several: Any = [documents] if is_one else documents
        paths = [os.fspath(own) for own in several]
        with (reader := pages_reader(self._config, wish)).documents:
            _warn_of_budget(self._config, reader)
            found = find_reading(paths, self._informed(settings), reader, wish)
            reading = found.plan(output)

            def written(summary: BatchSummary) -> None:
                for line in (found.source.about, *reading.write(summary)):
                    logger.info("%s", line)

            return self._batch(reading.job, report, live, after=written)

    def extract(
        self,
        prompts: Prompts | Conversation,
        schema: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        *,
        retries: int = VALIDATE_RETRIES,
    ) -> list[Any]:
        """Returns an object of a class for each prompt, in their order, or an ItemError in its
        place: `llm.extract(prompts, MyModel) -> list[MyModel | ItemError]`.

        prompts: as for `generate`, or one conversation.
        schema: a class of pydantic; with a JSON schema, or a file with one, the results are its
        values. Answers are generated by it; one that breaks it, such as a validator of the class,
        is asked again up to `retries` times. One that was cut off is an ItemError.
        """
        from mmdeploy_llm.batch.answers.checks import open_checks
        from mmdeploy_llm.batch.answers.rules import TextRules
        from mmdeploy_llm.batch.answers.schemas import AnswerSchema
        from mmdeploy_llm.batch.answers.validated import Validated

        shape = AnswerSchema.given(schema)
        if shape is None:
            raise ConfigError("extract needs a schema: a class of pydantic, or a JSON schema")
        conversation = [prompts] if is_conversation(prompts) else as_prompts(prompts)
        items = [as_prompt(item) for item in conversation]
        each = params_for(sampling_params, len(items), "prompts")
        asks = [
            Ask(prompt=item, params=shape.guided(own), item=number)
            for number, (item, own) in enumerate(zip(items, each, strict=True))
        ]
        found: dict[int, Any] = {}
        with open_checks(shape, TextRules()) as checks, Progress(len(asks), use_tqdm) as progress:
            for answer in Validated(self, checks, retries).answer_each(asks):
                found[answer.ask.item] = extracted(answer, shape)
                progress.count(answer.output)
        return [found[number] for number in range(len(items))]

    @takes(BatchOptions)
    def estimate_batch(
        self,
        input: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
        *,
        num_items: int = NUM_ITEMS,
        seed: int = 0,
        prompt: str | None = None,
        sampling_params: SamplingParams | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[BatchOptions],
    ) -> Estimate:
        """Answers `num_items` items of a batch, drawn at random, and returns what all of them will
        take on this machine, see Estimate. Writes nothing; `print(estimate)` shows it.

        seed: the same one draws the same items. The other arguments are those of run_batch. The
        items of an iterator are read to its end.
        """
        from mmdeploy_llm.batch.documents.sources import Sources
        from mmdeploy_llm.batch.estimate.estimate import estimate
        from mmdeploy_llm.batch.job import source_of
        from mmdeploy_llm.batch.options import option_settings
        from mmdeploy_llm.batch.settings import BatchSettings

        settings = BatchSettings(
            sampling_params=one_params(sampling_params),
            chat_template_kwargs=dict(chat_template_kwargs or {}),
            question=prompt,
            **option_settings(options),
            max_media_bytes=self._config.max_media_bytes,
            allowed_media_root=self._config.allowed_media_root,
        )
        with Sources(self._config, settings.finding.pages) as sources:
            source = source_of(input, self._informed(settings, sources))
            return estimate(source, settings.selection, self, num_items=num_items, seed=seed)

    def _settings(
        self,
        resume: bool | Literal["anyway"],
        overwrite: bool,
        retry_failed: bool | Collection[int | str] | str,
        chat_template_kwargs: Mapping[str, Any] | None,
        use_tqdm: UseTqdm,
        **fields: Any,
    ) -> BatchSettings:
        """Returns the settings of a batch that is written. fields: those that not all of them
        have."""
        from mmdeploy_llm.batch.engine import describe_engine
        from mmdeploy_llm.batch.options import mode_of
        from mmdeploy_llm.batch.settings import BatchSettings
        from mmdeploy_llm.data.records.outcome import Retried

        config = self._config
        return BatchSettings(
            mode=mode_of(resume, overwrite),
            chat_template_kwargs=dict(chat_template_kwargs or {}),
            retried=Retried.parse(retry_failed),
            max_media_bytes=config.max_media_bytes,
            allowed_media_root=config.allowed_media_root,
            is_any_config_kept=resume == "anyway",
            describe_engine=partial(describe_engine, config),
            use_tqdm=where_seen(use_tqdm),
            **fields,
        )

    def _informed(self, settings: BatchSettings, sources: Sources | None = None) -> BatchSettings:
        """Returns the settings with what this engine decides about media. sources: of files."""
        from mmdeploy_llm.engine.startup.kinds import accepted_kinds, known_kinds, usual_question
        from mmdeploy_llm.media.loading.reader import open_reader

        config = self._config
        return settings.for_model(
            lambda: open_reader(config),
            known_kinds(config),
            lambda: accepted_kinds(config),
            None if sources is None else sources.open,
            usual_question(config),
        )

    def _batch(
        self,
        job: BatchJob,
        report: str | os.PathLike[str] | None,
        live: bool | int,
        after: Callable[[BatchSummary], object] = bool,
    ) -> BatchSummary:
        """Runs a batch and writes its report, if one is wanted, with the frames of its videos.
        after: called with the summary, also of a run that Ctrl-C has ended."""
        from mmdeploy_llm.batch.job import run_batch
        from mmdeploy_llm.batch.report.previews import FilePreviews
        from mmdeploy_llm.batch.report.whole import ReportOptions, RunReport
        from mmdeploy_llm.engine.startup.media import check_boxes, open_media
        from mmdeploy_llm.media.loading.reader import open_reader

        if job.settings.boxes:
            check_boxes(self._config, job.settings.sampling_params)
        if report is None:
            if live:
                raise ConfigError("live serves the report: name its file with report")
            return _ended(run_batch(job, self._lent), after)
        config, media = self._config, self._desk.media
        previews = FilePreviews(
            lambda: open_reader(config) if media is None else media,
            lambda: open_media(config) if media is None else media,
        )
        port = None if live is False else 0 if live is True else live
        options = ReportOptions(model=config.model, about={}, live_port=port)
        whole = RunReport(job, Path(report), previews, options)
        if whole.url is not None:
            logger.info("the report, while the run goes on: %s", whole.url)
        summary = whole.run(self._lent)
        whole.write(summary)
        return _ended(summary, after)


def extracted(answer: Answer, shape: AnswerSchema) -> Any:
    """Returns the object of an answer, or an ItemError."""
    from mmdeploy_llm.data.records.making import error_of
    from mmdeploy_llm.data.records.record import ItemError

    output, first = answer.output, answer.output.outputs[0]
    if not output.is_ok:
        return error_of(output, answer.error)
    if first.finish_reason == "length" and not first.is_valid:
        words = "the answer was cut off before its JSON was whole; raise max_tokens"
        kind = InvalidAnswerError.__name__
        return ItemError(code=InvalidAnswerError.code, kind=kind, message=words)
    return shape.value_of(first.text.strip())


def _ended(summary: BatchSummary, after: Callable[[BatchSummary], object]) -> BatchSummary:
    """Returns the summary. Raises KeyboardInterrupt for a run that Ctrl-C has ended."""
    after(summary)
    if summary.ending == "interrupted":
        raise KeyboardInterrupt
    return summary


def _warn_of_budget(config: EngineConfig, reader: Reader) -> None:
    """Says that a preset is made for another budget of a page, where the caller has given none."""
    is_given = "image_tokens" in config.model_fields_set
    if not is_given and reader.image_tokens not in (None, "full"):
        logger.warning(
            "the preset %s is made for LLM(image_tokens=%r), which is not given",
            reader.asking.preset.name,
            reader.image_tokens,
        )
