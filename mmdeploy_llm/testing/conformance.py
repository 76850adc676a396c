"""The conformance classes for parsers, processors and plugins: pytest's view of the checks.

Each check of `checks/` becomes one test method, `test_` and its name. A subclass may replace one,
mark it, or add tests of its own, which take the fixture `subject`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from mmdeploy_llm.hooks import (
    Checkpoint,
    MediaLimits,
    MediaProcessorSpec,
    ReasoningParserSpec,
    ToolParserSpec,
)

from .checks import parsers, plugins, processors, tools
from .checks.base import Check, CheckSkipped


def _method(name: str, check: Check) -> Any:
    def test(self: Any, subject: Any) -> None:
        try:
            check(subject)
        except CheckSkipped as reason:
            pytest.skip(str(reason))

    test.__name__ = name
    test.__qualname__ = name
    test.__doc__ = check.__doc__
    return test


class Conformance:
    """What all classes share: a test for each of `checks`, which gets the fixture
    `subject`."""

    checks: ClassVar[Sequence[Check]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for check in cls.__dict__.get("checks", ()):
            name = f"test_{check.__name__}"
            if name not in cls.__dict__:
                setattr(cls, name, _method(name, check))


class ReasoningParserConformance(Conformance):
    """spec: the parser. examples: texts, and what the parser must make of them.

    Beside the examples the parser is tried on texts and prompts made of its own `markers`.
    """

    checks = parsers.CHECKS
    spec: ClassVar[ReasoningParserSpec]
    examples: ClassVar[Sequence[parsers.ParserExample]] = ()

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls) -> parsers.ParserSubject:
        """What the checks get; `subject.new()` gives a parser."""
        return parsers.ParserSubject(spec=cls.spec, examples=tuple(cls.examples))


class ToolParserConformance(Conformance):
    """spec: the parser. examples: texts, and what the parser must make of them.

    Beside the examples the parser is tried on texts made of its own `markers`.
    """

    checks = tools.CHECKS
    spec: ClassVar[ToolParserSpec]
    examples: ClassVar[Sequence[tools.ToolParserExample]] = ()

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls) -> tools.ToolParserSubject:
        """What the checks get; `subject.new()` gives a parser."""
        return tools.ToolParserSubject(spec=cls.spec, examples=tuple(cls.examples))


class MediaProcessorConformance(Conformance):
    """spec: the processor. All else has a default that suits a processor of images or videos in
    the usual file formats; one of another medium gives at least `samples`, `corrupt` and
    `too_large`.

    samples: name -> a source as a caller gives it: bytes of a file, or a loaded object. At least
    two, of different content.
    corrupt: name -> bytes that must raise MediaError. Beside them the bytes of all samples are
    cut off and damaged, which may raise MediaError and nothing else.
    too_large: name -> (source, limits) that must raise MediaLimitError in `decode`. Where the
    source is a file cut off behind its header, this shows that limits are checked before decoding.
    options: the engine's mm_processor_kwargs for the factory. other_options: such that the same
    sample gets another key (None: it has no options). item_options: options of one item (a video's
    fps) that change its key (None: an item has no options).
    """

    checks = processors.CHECKS
    spec: ClassVar[MediaProcessorSpec]
    samples: ClassVar[Mapping[str, Any] | None] = None
    corrupt: ClassVar[Mapping[str, bytes] | None] = None
    too_large: ClassVar[Mapping[str, tuple[Any, MediaLimits]] | None] = None
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    other_options: ClassVar[Mapping[str, Any] | None] = None
    item_options: ClassVar[Mapping[str, Any] | None] = None

    @staticmethod
    def checkpoint(folder: Path) -> Checkpoint:
        """The checkpoint that the factory gets; `folder` is empty and may be written to."""
        return Checkpoint(folder=folder, config=SimpleNamespace())

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, tmp_path_factory: pytest.TempPathFactory) -> Any:
        """What the checks get; `subject.processor` is built once for all tests of the class."""
        subject = processors.ProcessorSubject(
            spec=cls.spec,
            checkpoint=cls.checkpoint(tmp_path_factory.mktemp("checkpoint")),
            samples=cls.samples,
            corrupt=cls.corrupt,
            too_large=cls.too_large,
            options=cls.options,
            other_options=cls.other_options,
            item_options=cls.item_options,
        )
        yield subject
        subject.close()


class PluginConformance(Conformance):
    """plugin: the module with the hook implementations, or its name, or the name of an installed
    plugin's entry point.

    max_import_seconds: what importing the module may take, beyond importing `mmdeploy_llm.hooks`.
    """

    checks = plugins.CHECKS
    plugin: ClassVar[ModuleType | str]
    max_import_seconds: ClassVar[float] = plugins.MAX_IMPORT_SECONDS

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls) -> plugins.PluginSubject:
        """What the checks get."""
        return plugins.PluginSubject.of(cls.plugin, max_import_seconds=cls.max_import_seconds)
