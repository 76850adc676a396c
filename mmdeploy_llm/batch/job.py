"""Plans a batch (checks input and output, finds what is left to do), runs it and sums it up."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from mmdeploy_llm.batch.answers import VALIDATE_RETRIES
from mmdeploy_llm.batch.answers.checks import open_checks
from mmdeploy_llm.batch.answers.rounds import Answerer
from mmdeploy_llm.batch.answers.rules import TextRules
from mmdeploy_llm.batch.answers.schemas import AnswerSchema
from mmdeploy_llm.batch.progress.teller import Teller, TellingOptions
from mmdeploy_llm.batch.questions.asks import NO_ASKS, Asks
from mmdeploy_llm.data.files.contents import Reader
from mmdeploy_llm.data.files.duplicates import duplicates_of
from mmdeploy_llm.data.files.options import FindingOptions
from mmdeploy_llm.data.outputs.base import RecordSink, Sink
from mmdeploy_llm.data.outputs.opening.choose import open_sink
from mmdeploy_llm.data.outputs.scan import Kept, Mode
from mmdeploy_llm.data.outputs.sidecars.options import DEFAULT_SUFFIX, SidecarOptions
from mmdeploy_llm.data.records.configuration import Configuration
from mmdeploy_llm.data.records.files import OutputLostError, OutputWriteError
from mmdeploy_llm.data.records.ids import Selection
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.records.outcome import ALL_FAILED, Retried
from mmdeploy_llm.data.records.state import RunState
from mmdeploy_llm.data.rows.rows import MAX_CELL_BYTES, BadItem
from mmdeploy_llm.engine.desk.deaths import ENGINE_RESTARTS
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import KindTable
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.text.progress_bars import UseTqdm

from .answering import NoModel, answerer_of, counts_of
from .corpus.columns import ColumnOptions
from .earlier_run import known_again
from .file_source import FileSource
from .in_order import InOrder
from .overlap import check_apart
from .picture_folders import check_beside, folder_of, sidecars_of
from .run import BatchRun, Ending, Finish, LeftToDo, RunCounts, Tally, Watch
from .sources import Source, open_source
from .summary import BatchSummary, InputChange, about, begun, ended, summary_of

logger = logging.getLogger(__name__)

OpenLLM = Callable[[], AbstractContextManager[Answerer]]
MAX_BAD_AHEAD = 1000  # bad lines that are skipped in search of a good one before the model loads


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """How a batch is run.

    sampling_params, chat_template_kwargs: defaults for what a line does not set itself.
    question: the question about each file of a folder, or each row of a corpus; asks: several of
        them, by name. system: the message before them, and in lines whose messages have none.
    columns: of a corpus; max_media_bytes: the largest image or video inside of it;
        allowed_media_root: of the engine, to which its links may lead.
    finding: which files of a folder are read; is_recursive: whether those of subfolders are.
    selection: the lines of the input to process.
    format, part_items, journal: of the output, see open_sink.
    max_failures: stop after this many failed items in this run.
    retried: the items with a record that mode "resume" does again.
    schema: JSON schema that every answer must keep; None: any answer. rules: for their texts. One
        that breaks them is asked again up to `validate_retries` times.
    engine_restarts: how often in a row an engine that died is started again, where it can be.
    is_any_config_kept: whether mode "resume" keeps results of another configuration.
    describe_engine: returns what decides the engine's answers; called when a run needs a model.
    sidecars: the texts that are written beside pictures; None writes none.
    boxes: whether the boxes in answers are read. finish: makes of a record what is written.
    use_tqdm: see open_bar; None: lines where nobody sees a bar. telling: what is told besides.
    """

    mode: Mode = "new"
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    question: str | None = None
    asks: Asks = NO_ASKS
    system: str | None = None
    columns: ColumnOptions = field(default_factory=ColumnOptions)
    max_media_bytes: int = MAX_CELL_BYTES
    allowed_media_root: str | os.PathLike[str] | None = None
    finding: FindingOptions = field(default_factory=FindingOptions)
    selection: Selection = field(default_factory=Selection)
    is_recursive: bool = True
    format: str | None = None
    part_items: int | None = None
    journal: str | os.PathLike[str] | None = None
    max_failures: int | None = None
    retried: Retried = ALL_FAILED
    schema: AnswerSchema | None = None
    rules: TextRules = field(default_factory=TextRules)
    validate_retries: int = VALIDATE_RETRIES
    engine_restarts: int = ENGINE_RESTARTS
    is_any_config_kept: bool = False
    describe_engine: Callable[[], Configuration] = Configuration
    use_tqdm: UseTqdm | None = None
    watch: Watch | None = None
    sidecars: SidecarOptions | None = None
    boxes: bool = False
    finish: Finish | None = None
    telling: TellingOptions = field(default_factory=TellingOptions)

    def __post_init__(self) -> None:
        self.asks.check(self.question)
        if self.schema is not None:
            object.__setattr__(self, "sampling_params", self.schema.guided(self.sampling_params))
        if self.max_failures is not None and self.max_failures < 1:
            raise ConfigError(f"max_failures must be at least 1, got {self.max_failures}")
        for name in ("validate_retries", "engine_restarts"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")

    @property
    def sidecar(self) -> str:
        """The suffix of the texts beside files, which questions may name too."""
        return DEFAULT_SUFFIX if self.sidecars is None else self.sidecars.suffix

    def for_model(
        self,
        open_reader: Callable[[], Reader],
        table: KindTable | None = None,
        accepted: Callable[[], Collection[str]] | None = None,
        new_source: Callable[..., Any] | None = None,
        question: Callable[[], str | None] | None = None,
    ) -> BatchSettings:
        """Returns the settings with what the model decides; see FindingOptions, and Asks.of_model
        for the question."""
        known: dict[str, Any] = {"open_reader": open_reader, "table": table, "accepted": accepted}
        finding = replace(self.finding, new_source=new_source, **known)
        return replace(self, finding=finding, asks=replace(self.asks, of_model=question))

    def configuration(self) -> Configuration:
        """Returns every setting that decides the answers; the items have digests of their own."""
        engine = self.describe_engine()
        params = self.sampling_params.model_dump(mode="json", exclude_defaults=True)
        values = {
            **engine.values,
            **{f"sampling_params.{name}": value for name, value in params.items()},
            **{f"chat_template_kwargs.{n}": v for n, v in self.chat_template_kwargs.items()},
            **({} if self.question is None else {"prompt": self.question}),
            **self.asks.values(),
            **({} if self.system is None else {"system": self.system}),
            **{f"columns.{name}": value for name, value in self.columns.values().items()},
            **({} if self.schema is None else self.schema.configuration()),
            **self.rules.values(),
            **({"boxes": True} if self.boxes else {}),
            **self.finding.values(),
        }
        return replace(engine, values=values)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """A batch that has been checked and not started.

    items: the items left to do; can be iterated once. left: counts them.
    needs_model: False when only lines that cannot be used are left.
    is_empty: whether nothing is left to do.
    configuration: None until the run needs it.
    gone: ids of records whose files are gone; the run removes them where that is asked for.
    folder: of a corpus, beneath which its pictures may have sidecars; see beside.folder_of.
    """

    source: Source
    sink: Sink
    settings: BatchSettings
    kept: Kept
    items: Iterator[Item | BadItem]
    left: LeftToDo
    needs_model: bool
    is_empty: bool
    configuration: Configuration | None = None
    gone: frozenset[str] = frozenset()
    folder: str | None = None


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
        check_apart(os.fspath(given), sink, kinds, settings.telling.log_json)
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
    check_beside(settings, sink, is_corpus=is_corpus)
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
    if kept.num_unchecked:
        logger.warning(
            "%d results in %r are of an older version, without digests: it cannot be checked "
            "whether their input or the configuration has changed",
            kept.num_unchecked,
            sink.name,
        )
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
    with Teller(settings.telling, use_tqdm=settings.use_tqdm, about=about(job)) as teller:
        teller.tell("started", **begun(job))
        summary = _done(job, open_llm, teller)
        teller.tell("finished", **ended(summary))
    return summary


def _done(job: BatchJob, open_llm: OpenLLM, teller: Teller) -> BatchSummary:
    num_before = len(job.kept.index)
    if _is_complete(job):
        with sidecars_of(job) as sidecars:
            sidecars.fill(job.kept.index)
        return summary_of(job, "done", RunCounts(), num_before, None, sidecars=sidecars.counts)
    with ExitStack() as stack:
        sidecars = stack.enter_context(sidecars_of(job))
        checks = stack.enter_context(open_checks(job.settings.schema, job.settings.rules))
        llm = stack.enter_context(open_llm() if job.needs_model else NoModel())
        teller.tell("loaded")
        answerer = answerer_of(llm, job.settings, checks, teller.tell)
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
            tell=teller.tell,
        )
        teller.watch(tally.progress)
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
    is_done = state is None or state.ending == "done"  # no state: of an older version
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
