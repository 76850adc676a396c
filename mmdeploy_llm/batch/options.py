"""The options of LLM.run_batch that are those of a corpus, of an output and of answers that are
asked again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mmdeploy_llm.batch.answers.rules import TextRules
from mmdeploy_llm.batch.answers.schemas import AnswerSchema
from mmdeploy_llm.batch.progress.reporter import ProgressOptions
from mmdeploy_llm.batch.questions.asks import Asks
from mmdeploy_llm.data.files.arguments import FindingArguments, PageArguments
from mmdeploy_llm.data.files.options import FindingOptions
from mmdeploy_llm.data.outputs.scan import Mode
from mmdeploy_llm.data.outputs.sidecars.arguments import SidecarArguments
from mmdeploy_llm.data.outputs.sidecars.options import SidecarOptions
from mmdeploy_llm.data.records.ids import ORDERS, Selection
from mmdeploy_llm.errors import ConfigError

from .arguments import BatchOptions, OutputArguments, check_known
from .corpus.arguments import ColumnArguments
from .corpus.columns import ColumnOptions


def output_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of BatchSettings, which has the defaults, for AskingArguments
    and RunArguments. Raises ConfigError."""
    settings = dict(options)
    asks = Asks.given(settings.pop("ask", None))
    schema = AnswerSchema.given(settings.pop("schema", None), settings.pop("validate", None))
    selection = selected(
        **{name: settings.pop(name) for name in SELECTED if name in settings},
    )
    if "recursive" in settings:
        settings["is_recursive"] = settings.pop("recursive")
    names = ("avoid", "max_words", "max_chars")
    settings["rules"] = TextRules.given(*(settings.pop(name, None) for name in names))
    if "log_json" in settings:
        settings["progress"] = ProgressOptions(log_json=settings.pop("log_json"))
    return {**settings, "selection": selection, "schema": schema, "asks": asks}


def mode_of(resume: bool | str, overwrite: bool) -> Mode:
    """Returns how to treat an existing output. resume: True, False or "anyway". Raises
    ConfigError."""
    if resume not in (True, False, "anyway"):
        raise ConfigError(f"resume must be True, False or 'anyway', got {resume!r}")
    if resume and overwrite:
        raise ConfigError("resume and overwrite contradict each other; give one of them")
    return "resume" if resume else "overwrite" if overwrite else "new"


GROUPS = (ColumnArguments, FindingArguments, PageArguments, SidecarArguments, OutputArguments)
SELECTED = ("shard", "limit", "random", "random_seed", "only", "order")


def selected(
    *,
    shard: str | None = None,
    limit: int | None = None,
    random: bool = False,
    random_seed: int | None = None,
    only: Collection[str] | None = None,
    order: str = ORDERS[0],
) -> Selection:
    """Returns the selection of these options. Raises ConfigError."""
    if random_seed is not None and not random:
        raise ConfigError("random_seed has an effect only with random")
    if isinstance(only, str):
        raise ConfigError(f"only must be a list of ids, got the text {only[:40]!r}")
    return Selection.parse(
        shard,
        limit,
        seed=(random_seed or 0) if random else None,
        only=None if only is None else frozenset(map(str, only)),
        order=order,
    )


def option_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of BatchSettings for the options. Raises ConfigError, also for an unknown
    one."""
    check_known("run_batch", options, BatchOptions, "report", "prompt")
    columns, finding, pages, sidecars, output = (
        {name: value for name, value in options.items() if name in group.__annotations__}
        for group in GROUPS
    )
    named: Any = columns
    return {
        "columns": ColumnOptions.given(named),
        "finding": FindingOptions.given({**finding, **pages}),
        "sidecars": SidecarOptions.given(sidecars),
        **output_settings(output),
    }
