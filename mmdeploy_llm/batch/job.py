"""Plans a batch (checks input and output, finds what is left to do), runs it and sums it up."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from mmdeploy_llm.batch.answers.checks import open_checks
from mmdeploy_llm.batch.progress.reporter import ProgressReporter
from mmdeploy_llm.data.files.duplicates import duplicates_of
from mmdeploy_llm.data.outputs.base import RecordSink, Sink
from mmdeploy_llm.data.outputs.opening.choose import open_sink
from mmdeploy_llm.data.outputs.scan import Kept
from mmdeploy_llm.data.records.configuration import Configuration
from mmdeploy_llm.data.records.files import OutputLostError, OutputWriteError
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.records.state import RunState
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.engine.desk.answerer import Answerer
from mmdeploy_llm.errors import ConfigError

from .answering import NoModel, answerer_of, counts_of
from .earlier_run import known_again
from .file_source import FileSource
from .in_order import InOrder
from .overlap import check_no_overlap
from .picture_folders import check_lists_and_sidecars, folder_of, sidecars_of
from .run import BatchRun, Ending, LeftToDo, RunCounts, Tally
from .settings import BatchJob, BatchSettings, OpenLLM
from .sources import Source, open_source
from .summary import BatchSummary, InputChange, about, begun, ended, summary_of

MAX_BAD_AHEAD = 1000  # bad lines that are skipped in search of a good one before the model loads


def plan_batch(
    given: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
    output: str | os.PathLike[str] | Sink,
    settings: BatchSettings,
) -> BatchJob:
    """Plans a batch over a corpus, a folder or an iterable of dicts, without changing any file.

    Raises ConfigError for an input that does not exist and an output that cannot be written.
    """
    sink = open_output(output, settings)
    if isinstance(given, (str, os.PathLike)):
        kinds = settings.finding.wanted().table
        check_no_overlap(os.fspath(given), sink, kinds, settings.progress.log_json)
    sink.check(settings.mode)
    planned = _planned(source_of(given, settings), sink, settings)
    return replace(planned, folder=folder_of(given))


def source_of(
    given: str | os.PathLike[str] | Iterable[Mapping[str, Any]], settings: BatchSettings
) -> Source:
    """Opens the input of a batch. Raises ConfigError for one that does not exist."""
    if isinstance(given, Mapping):
        raise ConfigError("a batch is an iterable of dicts or a path, got one dict; put it in []")
    return open_source(
        given,
        settings.sampling_params,
        settings.selection,
        question=settings.question,
        asks=settings.asks,
        template_kwargs=settings.chat_template_kwargs,
        system=settings.system,
        columns=settings.columns,
        max_bytes=settings.max_media_bytes,
        root=settings.allowed_media_root,
        finding=settings.finding,
        is_recursive=settings.is_recursive,
        sidecar=settings.sidecar,
    )


def plan_source(
    source: Source, output: str | os.PathLike[str] | Sink, settings: BatchSettings
) -> BatchJob:
    """Plans a batch over a source. Raises ConfigError as `plan_batch` does."""
    sink = open_output(output, settings)
    sink.check(settings.mode)
    return _planned(source, sink, settings)


def _planned(source: Source, sink: Sink, settings: BatchSettings) -> BatchJob:
    kept, configuration, leftovers = Kept(), None, None
    is_corpus = not isinstance(source, FileSource)
    check_lists_and_sidecars(settings, sink, is_corpus=is_corpus)
    settings.finding.check(settings.mode, source.skipped, is_corpus=is_corpus)
    if settings.mode == "resume":
        place_of = source.place_of
        if isinstance(source, FileSource) and sink.exists():
            leftovers = known_again(source, sink, is_pruned=settings.finding.prune)
            place_of = leftovers.place_of
        kept = sink.scan(place_of, retried=settings.retried)
        configuration = _checked(sink, kept, settings)
    todo = iter(left := LeftToDo(source, kept.done))
    ahead = list(_until_item(todo))
    return BatchJob(
        source=source,
        sink=sink,
        settings=settings,
        kept=kept,
        items=itertools.chain(ahead, todo),
        left=left,
        needs_model=len(ahead) > MAX_BAD_AHEAD or isinstance(next(iter(ahead[-1:]), None), Item),
        is_empty=not ahead,
        configuration=configuration,
        gone=frozenset() if leftovers is None else frozenset(leftovers.ids),
    )


def open_output(output: str | os.PathLike[str] | Sink, settings: BatchSettings) -> Sink:
    """Opens the sink of a batch, unless it is one; raises ConfigError for a name of no format."""
    return open_sink(
        output,
        settings.format,
        part_items=settings.part_items,
        journal=settings.journal,
        kinds=settings.finding.wanted().table,
    )


def _checked(sink: Sink, kept: Kept, settings: BatchSettings) -> Configuration | None:
    """Returns the configuration if results of an earlier run had to be compared with it. Raises
    ConfigError when they are of another one, unless that is allowed."""
    if not kept.configs:
        return None
    configuration = settings.configuration()
    if not settings.is_any_config_kept:
        sink.configurations.check(configuration, kept.configs)
    return configuration


def _until_item(todo: Iterator[Item | BadItem]) -> Iterator[Item | BadItem]:
    """Yields from `todo` up to its first good item, or MAX_BAD_AHEAD + 1 bad lines."""
    for number, item in enumerate(todo):
        yield item
        if isinstance(item, Item) or number == MAX_BAD_AHEAD:
            return


def run_batch(job: BatchJob, open_llm: OpenLLM) -> BatchSummary:
    """Runs the job. Opens the model only when an item needs it, and before it changes the output;
    with nothing left to do the output stays as it is."""
    settings, listed = job.settings, job.settings.finding.skipped
    if listed is not None:
        job.source.skipped.write(listed)
    with ProgressReporter(
        settings.progress, use_tqdm=settings.use_tqdm, about=about(job)
    ) as reporter:
        reporter.tell("started", **begun(job))
        try:
            summary = _done(job, open_llm, reporter)
        except OutputWriteError as error:
            if error.filename is None:  # it says where the answers are
                raise
            raise OutputWriteError(
                error.errno,
                f"{error.filename!r} cannot be written ({error.strerror}): make space, or whatever "
                f"it lacks; the answers are in {job.sink.name!r} or beside it, and --resume does "
                "what is missing",
            ) from error
        reporter.tell("finished", **ended(summary))
    return summary


def _done(job: BatchJob, open_llm: OpenLLM, reporter: ProgressReporter) -> BatchSummary:
    num_before = len(job.kept.index)
    if _is_complete(job):
        with sidecars_of(job) as sidecars:
            sidecars.fill(job.kept.index)
        return summary_of(job, "done", RunCounts(), num_before, None, sidecars=sidecars.counts)
    with ExitStack() as stack:
        sidecars = stack.enter_context(sidecars_of(job))
        checks = stack.enter_context(open_checks(job.settings.schema, job.settings.rules))
        llm = stack.enter_context(open_llm() if job.needs_model else NoModel())
        reporter.tell("loaded")
        answerer = answerer_of(llm, job.settings, checks, reporter.tell)
        job = _with_configuration(job)
        writer = stack.enter_context(job.sink.writer(job.settings.mode, job.kept))
        writer = sidecars.around(writer)
        writer, job = _ordered(job, writer, stack)
        if job.configuration is not None:
            is_new = job.settings.mode != "resume"
            root = job.source.root if isinstance(job.source, FileSource) else None
            job.sink.configurations.write(
                job.configuration, job.kept.configs, is_new=is_new, root=root
            )
        _state(job, "running").write(job.sink.state_file)
        tally = Tally(
            unit=job.source.unit,
            total=job.source.total,
            num_before=num_before,
            mean_size=job.source.mean_size,
            use_tqdm=job.settings.use_tqdm,
            tell=reporter.tell,
        )
        reporter.watch(tally.progress)
        try:
            ending = _run(job, answerer, writer, tally)
        except (OutputLostError, OutputWriteError):
            raise
        except Exception:
            writer.check()  # a lost output is told first: other errors say that results are kept
            raise
        finally:
            tally.close()
        writer.finish(job.source.place_of)
        sidecars.fill(writer.index)
        change = InputChange.of(job) if ending == "done" else None
        is_known = ending == "done" and job.left.is_read and change is None
        total = job.left.num_met if is_known else None
        _state(job, ending, total).write(job.sink.state_file)
    counts = counts_of(tally, answerer)
    return summary_of(job, ending, counts, num_before, writer, change, sidecars.counts)


def _ordered(job: BatchJob, writer: RecordSink, stack: ExitStack) -> tuple[RecordSink, BatchJob]:
    """Returns a writer that keeps the order of the input, if that is wanted, and its job."""
    if job.settings.selection.order != "input":
        return writer, job
    ordered = stack.enter_context(InOrder(writer, job.kept.done))
    return ordered, replace(job, items=ordered.noted(job.items))


def _is_complete(job: BatchJob) -> bool:
    """Whether nothing is left to do, and the last run has said so."""
    if not job.is_empty or job.settings.mode != "resume" or not job.sink.exists():
        return False
    state = RunState.read(job.sink.state_file)
    is_done = state is not None and state.ending == "done"
    return is_done and not job.kept.drops and not job.sink.is_growing()


def _with_configuration(job: BatchJob) -> BatchJob:
    if job.configuration is not None or not job.needs_model:
        return job
    return replace(job, configuration=job.settings.configuration())


def _state(job: BatchJob, ending: str, total: int | None = None) -> RunState:
    """Returns the state of a run. total: items of the input, where they are known exactly."""
    chosen = job.settings.selection
    return RunState(
        ending=ending,
        total=job.source.total if total is None else total,
        shard=chosen.shard,
        num_shards=chosen.num_shards,
        output=job.sink.name,
    )


def _run(job: BatchJob, llm: Answerer, writer: RecordSink, tally: Tally) -> Ending:
    digest = "" if job.configuration is None else job.configuration.digest
    if (watch := job.settings.watch) is not None:
        watch.begin(tally)
    schema = job.settings.schema
    with duplicates_of(job.settings.finding, job.sink, digest) as same:
        run = BatchRun(
            job.items,
            writer,
            tally=tally,
            max_failures=job.settings.max_failures,
            watch=watch,
            config_digest=digest,
            duplicates=same,
            finish=job.settings.finish,
            is_json=schema is not None and schema.is_guide,
        )
        return run.run(llm)
