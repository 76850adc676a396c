"""Says which checks the objects of each hook have, and which class takes what they are given. Both
are imported where a plugin has such an object, since some of them import torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from mmdeploy_llm.hooks import (
    AttentionBackendSpec,
    ChatPartSpec,
    CorpusFormatSpec,
    LogitsProcessorSpec,
    MediaProcessorSpec,
    OutputSinkSpec,
    ReasoningParserSpec,
    ToolParserSpec,
    WeightFormatSpec,
)
from mmdeploy_llm.hooks.names import listing
from mmdeploy_llm.testing.models.base import Check

FETCHER = "fetch_media"


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """The checks of the objects of a hook. modules: with a list CHECKS each. subject:
    "module:Class" of what they are called with. example: the same of one of its `examples`. All
    are below this package."""

    modules: tuple[str, ...]
    subject: str
    example: str = ""

    def checks(self) -> tuple[Check, ...]:
        """Returns the checks of all modules."""
        return sum((_module(name).CHECKS for name in self.modules), ())

    def subject_class(self) -> Any:
        """Returns the class of the subject."""
        return _named(self.subject)

    def examples(self, given: Sequence[Any]) -> tuple[Any, ...]:
        """Returns examples; one that is a mapping has the fields of their class."""
        kind = _named(self.example)
        made = tuple(kind(**each) if isinstance(each, Mapping) else each for each in given)
        wrong = [each for each in made if not isinstance(each, kind)]
        if wrong:
            raise TypeError(f"{wrong[0]!r:.80} is neither a mapping nor a {kind.__name__}")
        return made

    def fields(self) -> str:
        """Returns the names of the fields of an example."""
        return listing(each.name for each in fields(_named(self.example)))


def _module(name: str) -> Any:
    return importlib.import_module(f".{name}", __package__)


def _named(text: str) -> Any:
    module, _, name = text.partition(":")
    return getattr(_module(module), name)


DOORS: Mapping[type | str, Door] = MappingProxyType(
    {
        FETCHER: Door(modules=("plugins.fetchers",), subject="plugins.fetchers:FetcherSubject"),
        ReasoningParserSpec: Door(
            modules=("plugins.parsers",),
            subject="plugins.parsers:ParserSubject",
            example="plugins.parsers:ParserExample",
        ),
        ToolParserSpec: Door(
            modules=("plugins.tools",),
            subject="plugins.tools:ToolParserSubject",
            example="plugins.tools:ToolParserExample",
        ),
        LogitsProcessorSpec: Door(
            modules=("plugins.logits",),
            subject="plugins.logits:LogitsProcessorSubject",
            example="plugins.logits:LogitsExample",
        ),
        ChatPartSpec: Door(
            modules=("plugins.chat_parts",),
            subject="plugins.chat_parts:ChatPartSubject",
            example="plugins.chat_parts:ChatPartExample",
        ),
        MediaProcessorSpec: Door(
            modules=("media.processors",), subject="media.subject:ProcessorSubject"
        ),
        WeightFormatSpec: Door(
            modules=("weights.reading", "weights.products"),
            subject="weights.subject:WeightFormatSubject",
        ),
        AttentionBackendSpec: Door(
            modules=("attention.backends",), subject="attention.subject:BackendSubject"
        ),
        CorpusFormatSpec: Door(
            modules=("data.corpus",), subject="data.corpus_subject:CorpusSubject"
        ),
        OutputSinkSpec: Door(
            modules=("data.outputs", "data.parts"), subject="data.outputs:OutputSubject"
        ),
    }
)
SPLITTER = Door(modules=("media.splitters",), subject="media.splitter_subject:SplitterSubject")


def door_of(spec: Any) -> Door | None:
    """Returns the door of a spec; None for one whose checks need a checkpoint, or that has none."""
    if getattr(spec, "yields", None) is not None:
        return SPLITTER
    return DOORS.get(type(spec))
