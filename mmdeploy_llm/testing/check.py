"""check_plugin: runs the checks of an installed plugin that need no input from its author. The
checks of each kind are imported where the plugin has one, since some of them import torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mmdeploy_llm.hooks import (
    AttentionBackendSpec,
    ChatPartSpec,
    Checkpoint,
    CorpusFormatSpec,
    LogitsProcessorSpec,
    MediaProcessorSpec,
    ModelSpec,
    OutputSinkSpec,
    ReasoningParserSpec,
    ToolParserSpec,
    WeightFormatSpec,
)
from mmdeploy_llm.hooks.records import Spec, describe
from mmdeploy_llm.testing.models.base import CheckFailed, CheckSkipped
from mmdeploy_llm.testing.plugins import fresh, observers, plugins
from mmdeploy_llm.testing.plugins.declared import dated
from mmdeploy_llm.testing.plugins.installed import check_name
from mmdeploy_llm.testing.plugins.plugin_subject import PluginSubject

from .doors import DOORS, FETCHER
from .given import GivenFields
from .verdicts import Verdict, run

__all__ = ["Verdict", "check_plugin"]

# In this order, by what takes long: media processors come in between, models last.
QUICK = (ReasoningParserSpec, ToolParserSpec, LogitsProcessorSpec, ChatPartSpec)
FORMATS = (WeightFormatSpec, AttentionBackendSpec, CorpusFormatSpec, OutputSinkSpec)


def check_plugin(
    name: str, *, model_folder: Path | None = None, plugin_files: Sequence[Path] = ()
) -> Iterator[Verdict]:
    """Checks the installed plugin `name`, or the file with this path; yields one verdict per check
    as it finishes.

    Parsers are run on texts built from their markers, processors on generated media of their kind,
    models on transformers' default config of their architecture with few layers.
    model_folder: a checkpoint; the model that serves it gets all checks, processors get its files.
    plugin_files: plugins whose names are compared, too, as those of installed ones are.
    Raises PluginLoadError when no such plugin is installed, or the file cannot be read, and
    CheckpointError for an unreadable folder.
    """
    check_name(name)
    checkpoint = None
    if model_folder is not None:
        from mmdeploy_llm.weights.folder import read_checkpoint

        checkpoint = read_checkpoint(model_folder)
    subject = PluginSubject.of(name, beside=plugin_files)
    return (dated(verdict, subject) for verdict in _verdicts(subject, checkpoint))


def _verdicts(subject: PluginSubject, checkpoint: Checkpoint | None) -> Iterator[Verdict]:
    yield from run(plugins.CHECKS + fresh.CHECKS + observers.CHECKS, "", subject)
    try:
        manager = subject.manager
    except (CheckFailed, CheckSkipped):
        return  # the verdict of hooks_are_valid says why
    with ExitStack() as stack:
        given = GivenFields(plugin=subject, stack=stack)
        yield from run(given.checks(), "", given)
        if subject.has_hook(FETCHER):
            door = DOORS[FETCHER]
            fetch = {"fetch": subject.loaded.fetch_media, "serves": {}, **given.of(FETCHER)}
            yield from run(door.checks(), "fetcher", door.subject_class()(**fetch))
        for spec in _of(subject, *QUICK):
            yield from _checked(spec, subject, given)
        for spec in _of(subject, MediaProcessorSpec):
            from .check_processors import check_processor

            yield from check_processor(spec, checkpoint, given.of(spec.name))
        for spec in _of(subject, *FORMATS):
            yield from _checked(spec, subject, given)
    for spec in _of(subject, ModelSpec):
        from .check_models import check_model

        yield from check_model(spec, manager, checkpoint)


def _of(subject: PluginSubject, *kinds: type[Any]) -> list[Any]:
    """Returns the plugin's specs of these types, in their order."""
    return [spec for kind in kinds for spec in subject.specs if isinstance(spec, kind)]


def _checked(spec: Any, subject: PluginSubject, given: GivenFields) -> Iterator[Verdict]:
    """Yields the verdicts of a spec whose checks need no checkpoint."""
    door = DOORS[type(spec)]
    fields = {**_of_kit(spec, subject), **given.of(spec.name)}
    yield from run(door.checks(), describe(spec), door.subject_class()(spec=spec, **fields))


def _of_kit(spec: Spec, subject: PluginSubject) -> dict[str, Any]:
    """Returns the fields that no author gives."""
    if isinstance(spec, LogitsProcessorSpec):
        from .tiny import make_tokenizer

        return {"new_tokenizer": make_tokenizer}
    if isinstance(spec, ChatPartSpec):
        return {"others": tuple(own for own in _of(subject, ChatPartSpec) if own is not spec)}
    if isinstance(spec, CorpusFormatSpec | OutputSinkSpec):
        return {"file": subject.file}
    return {}
