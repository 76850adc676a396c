"""Pytest classes that run the checks of plugins, parsers, fetchers, chat parts and formats of data.
Their checks need no torch, so this module must not import it; what needs it has its own module.

Each function of a list CHECKS becomes a test method named test_<check>. A subclass may override or
mark one, or add its own tests with the fixture `subject`.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar

import pytest

from mmdeploy_llm.hooks import (
    ChatPartSpec,
    CorpusFormatSpec,
    MediaLimits,
    OutputSinkSpec,
    ReasoningParserSpec,
    ToolParserSpec,
)
from mmdeploy_llm.hooks.names import did_you_mean, listing
from mmdeploy_llm.hooks.registry import MAX_IMPORT_SECONDS
from mmdeploy_llm.testing.data import corpus, outputs, parts
from mmdeploy_llm.testing.data.corpus_subject import CorpusSubject
from mmdeploy_llm.testing.models.base import Check, CheckSkipped, newer_than
from mmdeploy_llm.testing.plugins import (
    chat_parts,
    fetchers,
    fresh,
    observers,
    parsers,
    plugins,
    tools,
)
from mmdeploy_llm.testing.plugins.declared import declared_by, is_ours
from mmdeploy_llm.testing.plugins.plugin_subject import PluginSubject

ATTRIBUTES_SINCE = (1, 2)  # the plugin API that refuses attributes that the kit does not read


def _method(name: str, check: Check) -> Any:
    def test(self: Any, subject: Any) -> None:
        try:
            check(subject)
        except CheckSkipped as reason:
            pytest.skip(str(reason))
        except Exception as failure:
            newer = newer_than(getattr(check, "since", None), declared_by(type(self)))
            if not newer:
                raise
            pytest.xfail(f"{newer}: {failure}")

    test.__name__ = name
    test.__qualname__ = name
    test.__doc__ = check.__doc__
    return test


def _attributes_are_known(tested: type) -> None:
    """Raises TypeError for an attribute of a test class that the kit does not read."""
    bases = tested.__mro__[1:]
    known = {name for base in bases for name in (*dir(base), *inspect.get_annotations(base))}
    known = {name for name in known if not name.startswith(("_", "test_", "pytest"))}
    for name, value in vars(tested).items():
        if name in known or name.startswith(("_", "test", "pytest")) or _is_fixture(value):
            continue
        hint = did_you_mean(name, known)
        is_function = callable(value) or isinstance(value, (staticmethod, classmethod))
        if hint or not is_function:  # functions and classes of the author's have any other name
            raise TypeError(
                f"{tested.__name__}.{name} is no attribute that the kit reads{hint}; it reads "
                f"{listing(known)}. Begin a name of your own with an underscore"
            )


def _is_fixture(value: Any) -> bool:
    """Whether a class has it by @pytest.fixture, of pytest 8.4 and later or of an earlier one."""
    kind = type(value).__name__
    return kind == "FixtureFunctionDefinition" or hasattr(value, "_pytestfixturefunction")


class Conformance:
    """Base class: creates a test method for each of `checks`, which gets the fixture `subject`. A
    subclass that sets `checks` runs these instead of those of its base. An attribute that the kit
    does not read raises TypeError."""

    checks: ClassVar[Sequence[Check]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        try:
            if not is_ours(cls.__module__):
                _attributes_are_known(cls)
        except TypeError as error:
            newer = newer_than(ATTRIBUTES_SINCE, declared_by(cls))
            if not newer:
                raise
            warnings.warn(f"{newer}: {error}", stacklevel=2)
        if "checks" not in cls.__dict__:
            return
        inherited = [check for base in cls.__mro__[1:] for check in vars(base).get("checks", ())]
        for check in (*inherited, *cls.checks):
            name = f"test_{check.__name__}"
            if name not in cls.__dict__:
                setattr(cls, name, _method(name, check) if check in cls.checks else None)


class ReasoningParserConformance(Conformance):
    """Tests a reasoning parser on examples, and on texts and prompts built from its `markers`.

    spec: the parser.
    examples: texts with the expected reasoning and content.
    """

    checks = parsers.CHECKS
    spec: ClassVar[ReasoningParserSpec]
    examples: ClassVar[Sequence[parsers.ParserExample]] = ()

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls) -> parsers.ParserSubject:
        """The argument of the checks; `subject.new()` builds a parser."""
        return parsers.ParserSubject(spec=cls.spec, examples=tuple(cls.examples))


class ToolParserConformance(Conformance):
    """Tests a parser of tool calls on examples, and on texts built from its `markers`.

    spec: the parser.
    examples: texts with the expected content and calls.
    """

    checks = tools.CHECKS
    spec: ClassVar[ToolParserSpec]
    examples: ClassVar[Sequence[tools.ToolParserExample]] = ()

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls) -> tools.ToolParserSubject:
        """The argument of the checks; `subject.new()` builds a parser."""
        return tools.ToolParserSubject(spec=cls.spec, examples=tuple(cls.examples))


class ChatPartConformance(Conformance):
    """Tests a chat part on examples and on odd values of its keys.

    spec: the part.
    examples: parts with what they become in the end. wrong: parts that must be refused.
    others: further specs of the plugin whose types it may become.
    takes: the kinds of media that the model takes.
    files: path or URL -> bytes, what `about.fetch` returns.
    """

    checks = chat_parts.CHECKS
    spec: ClassVar[ChatPartSpec]
    examples: ClassVar[Sequence[chat_parts.ChatPartExample]] = ()
    wrong: ClassVar[Sequence[Mapping[str, Any]]] = ()
    others: ClassVar[Sequence[ChatPartSpec]] = ()
    takes: ClassVar[tuple[str, ...]] = ("image", "video")
    files: ClassVar[Mapping[str, bytes]] = MappingProxyType({})

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls) -> chat_parts.ChatPartSubject:
        """The argument of the checks; `subject.expand(part)` writes a part."""
        return chat_parts.ChatPartSubject(
            spec=cls.spec,
            examples=tuple(cls.examples),
            wrong=tuple(cls.wrong),
            others=tuple(cls.others),
            takes=cls.takes,
            files=cls.files,
        )


class FetcherConformance(Conformance):
    """Tests a plugin that fetches media (`fetch_media`) on files and on a server that it starts.

    plugin: the module with the hook, its name, or the name of an installed plugin's entry point.
    serves: URI -> bytes, for what only the plugin can name.
    foreign: URIs that are another plugin's, for which it returns None.
    limits: with which `serves` are served.
    uri_of: (path) -> the URI by which the plugin reads this local file, or None; by default paths
        and file:// URLs are tried.
    url_of: (http URL) -> the URI by which the plugin fetches it, or None; by default the URL itself
        is tried.
    """

    checks = fetchers.CHECKS
    plugin: ClassVar[ModuleType | str]
    serves: ClassVar[Mapping[str, bytes]] = MappingProxyType({})
    foreign: ClassVar[Sequence[str]] = fetchers.FOREIGN
    limits: ClassVar[MediaLimits] = MediaLimits()
    uri_of: ClassVar[Any] = None
    url_of: ClassVar[Any] = None

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls) -> fetchers.FetcherSubject:
        """The argument of the checks."""
        return fetchers.FetcherSubject(
            fetch=PluginSubject.of(cls.plugin).loaded.fetch_media,
            serves=cls.serves,
            foreign=cls.foreign,
            limits=cls.limits,
            uri_of=cls.uri_of,
            url_of=cls.url_of,
        )


class CorpusFormatConformance(Conformance):
    """Tests a format of corpora.

    spec: the format. file: of its plugin, where that is a single file.
    samples: name -> bytes of a good file of the format, or its path, of a few rows each.
    rows: name of a sample -> the rows that it has.
    damaged: name -> (bytes, rows) of files with a damaged row, whose place in `rows` has None.
    write: a static method (path, rows) that writes a file of the format, for files that the kit
        makes: of rows with `id` and one column more. It raises for what it cannot store.
    column: the name of that column.
    values: name -> a value that the format can hold; None: all that `write` does not refuse.
    """

    checks = corpus.CHECKS
    spec: ClassVar[CorpusFormatSpec]
    file: ClassVar[Path | None] = None
    samples: ClassVar[Mapping[str, bytes | Path]] = MappingProxyType({})
    rows: ClassVar[Mapping[str, Sequence[Mapping[str, Any]]]] = MappingProxyType({})
    damaged: ClassVar[Mapping[str, tuple[bytes, Sequence[Mapping[str, Any] | None]]]] = (
        MappingProxyType({})
    )
    write: ClassVar[Any] = None
    column: ClassVar[str] = "value"
    values: ClassVar[Mapping[str, Any] | None] = None

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls) -> Any:
        """The argument of the checks."""
        return CorpusSubject(
            spec=cls.spec,
            file=cls.file,
            samples=cls.samples,
            rows=cls.rows,
            damaged=cls.damaged,
            write=cls.write,
            column=cls.column,
            values=cls.values,
        )


class OutputSinkConformance(Conformance):
    """Tests a format of outputs: round trips, kills, a full disk, records that are removed,
    parts with vectors and pictures.

    spec: the format. file: of its plugin, where that is a single file.
    """

    checks = outputs.CHECKS + parts.CHECKS
    spec: ClassVar[OutputSinkSpec]
    file: ClassVar[Path | None] = None

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls) -> outputs.OutputSubject:
        """The argument of the checks."""
        return outputs.OutputSubject(spec=cls.spec, file=cls.file)


class PluginConformance(Conformance):
    """Tests a plugin as a whole.

    plugin: the module with the hook implementations, its name, or the name of an installed
        plugin's entry point.
    max_import_seconds: limit for importing the module, without importing `mmdeploy_llm.hooks`.
    """

    checks = plugins.CHECKS + fresh.CHECKS + observers.CHECKS
    plugin: ClassVar[ModuleType | str]
    max_import_seconds: ClassVar[float] = MAX_IMPORT_SECONDS

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls) -> PluginSubject:
        """The argument of the checks."""
        return PluginSubject.of(cls.plugin, max_import_seconds=cls.max_import_seconds)
