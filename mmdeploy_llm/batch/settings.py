"""BatchSettings: how a batch is run. BatchJob: a batch that was checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from mmdeploy_llm.batch.answers import VALIDATE_RETRIES
from mmdeploy_llm.batch.answers.rules import TextRules
from mmdeploy_llm.batch.answers.schemas import AnswerSchema
from mmdeploy_llm.batch.progress.reporter import ProgressOptions
from mmdeploy_llm.batch.questions.asks import NO_ASKS, Asks
from mmdeploy_llm.data.files.contents import Reader
from mmdeploy_llm.data.files.options import FindingOptions
from mmdeploy_llm.data.outputs.base import Sink
from mmdeploy_llm.data.outputs.scan import Kept, Mode
from mmdeploy_llm.data.outputs.sidecars.options import DEFAULT_SUFFIX, SidecarOptions
from mmdeploy_llm.data.records.configuration import Configuration
from mmdeploy_llm.data.records.ids import Selection
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.records.outcome import ALL_FAILED, Retried
from mmdeploy_llm.data.rows.rows import MAX_CELL_BYTES, BadItem
from mmdeploy_llm.engine.desk.answerer import Answerer
from mmdeploy_llm.engine.desk.deaths import ENGINE_RESTARTS
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import KindTable
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.text.progress_bars import UseTqdm

from .corpus.columns import ColumnOptions
from .run import Finish, LeftToDo, Watch
from .sources import Source

OpenLLM = Callable[[], AbstractContextManager[Answerer]]


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
    use_tqdm: see open_bar; None: lines where nobody sees a bar. progress: how it is reported.
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
    progress: ProgressOptions = field(default_factory=ProgressOptions)

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
