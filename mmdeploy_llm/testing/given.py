"""Reads what an author gives to `plugins check`: the fields of the conformance classes, for each
spec and for the fetcher.

The plugin's module says where they are, so that listing plugins does not import them:

    CHECKED_WITH = "acme.checked:FIELDS"  # {"acme-album": {"samples": {"one": b"..."}}}

The name is that of a mapping, or of a function that returns a context manager of one, for what must
be set up and put away.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
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
from mmdeploy_llm.hooks.factories import imported
from mmdeploy_llm.hooks.names import did_you_mean, listing
from mmdeploy_llm.testing.attention.subject import BackendSubject
from mmdeploy_llm.testing.data.corpus_subject import CorpusSubject
from mmdeploy_llm.testing.data.outputs import OutputSubject
from mmdeploy_llm.testing.media.splitter_subject import SplitterSubject
from mmdeploy_llm.testing.media.subject import ProcessorSubject
from mmdeploy_llm.testing.models.base import Check, attributed, demand
from mmdeploy_llm.testing.plugins.chat_parts import ChatPartSubject
from mmdeploy_llm.testing.plugins.fetchers import FetcherSubject
from mmdeploy_llm.testing.plugins.logits import LogitsProcessorSubject
from mmdeploy_llm.testing.plugins.parsers import ParserSubject
from mmdeploy_llm.testing.plugins.plugin_subject import PluginSubject
from mmdeploy_llm.testing.plugins.tools import ToolParserSubject
from mmdeploy_llm.testing.weights.subject import WeightFormatSubject

NAME = "CHECKED_WITH"
FETCHER = "fetch_media"
FORM = f'{NAME} is "module:name" of a mapping: name of a spec, or {FETCHER} -> fields'
OF_THE_KIT = {"spec", "file", "checkpoint", "fetch", "others"}  # fields that are not given
SUBJECTS: tuple[tuple[type, type], ...] = (
    (AttentionBackendSpec, BackendSubject),
    (ChatPartSpec, ChatPartSubject),
    (CorpusFormatSpec, CorpusSubject),
    (LogitsProcessorSpec, LogitsProcessorSubject),
    (MediaProcessorSpec, ProcessorSubject),
    (OutputSinkSpec, OutputSubject),
    (ReasoningParserSpec, ParserSubject),
    (ToolParserSpec, ToolParserSubject),
    (WeightFormatSpec, WeightFormatSubject),
)


@dataclass(kw_only=True)
class GivenFields:
    """The fields of a plugin's subjects; {} until the check has read them. stack: closes what they
    need."""

    plugin: PluginSubject
    stack: ExitStack
    by_name: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def of(self, name: str) -> dict[str, Any]:
        """Returns the fields for the spec of this name."""
        return dict(self.by_name.get(name, {}))

    def checks(self) -> tuple[Check, ...]:
        """Returns the check of the fields; none for a plugin that gives none."""
        return (given_fields_are_known,) if hasattr(self.plugin.loaded, NAME) else ()


def given_fields_are_known(given: GivenFields) -> None:
    """CHECKED_WITH gives fields that the checks of the plugin's specs have."""
    plugin, named = given.plugin, getattr(given.plugin.loaded, NAME)
    with attributed(f"reading {NAME} = {named!r:.200}", FORM):
        found = imported(named) if isinstance(named, str) else named
        if callable(found):
            found = given.stack.enter_context(found())
    is_nested = isinstance(found, Mapping) and all(isinstance(x, Mapping) for x in found.values())
    demand(is_nested, f"{NAME} gives {found!r:.200}; {FORM}")
    known = {spec.name: _fields_of(spec) for spec in plugin.specs}
    if plugin.has_hook(FETCHER):
        known[FETCHER] = _names(FetcherSubject)
    for name, own in found.items():
        demand(
            name in known,
            f"{NAME} has fields for {name!r}{did_you_mean(name, known)}, which the plugin does not "
            f"provide; it provides {listing(known)}",
        )
        allowed = known[name]
        for each in own:
            demand(
                each in allowed,
                f"{NAME} gives {each!r}{did_you_mean(each, allowed)} for {name!r}, whose checks "
                f"have {listing(sorted(allowed)) or 'no such fields'}",
            )
    given.by_name = found


def _fields_of(spec: Any) -> frozenset[str]:
    if getattr(spec, "yields", None) is not None:
        return _names(SplitterSubject)
    kinds = (subject for kind, subject in SUBJECTS if isinstance(spec, kind))
    subject = next(kinds, None)
    return frozenset() if subject is None else _names(subject)


def _names(subject: Any) -> frozenset[str]:
    return frozenset(each.name for each in fields(subject) if each.init) - OF_THE_KIT
