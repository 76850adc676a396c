"""The pytest class that runs the checks of splitters."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import pytest

from mmdeploy_llm.hooks import MediaProcessorSpec
from mmdeploy_llm.testing.media import splitters
from mmdeploy_llm.testing.media.samples import CORRUPT
from mmdeploy_llm.testing.media.subject import checkpoint_of

from .conformance import Conformance


class SplitterConformance(Conformance):
    """Tests a splitter: a media processor whose spec has `yields`.

    spec: the splitter.
    samples: name -> a source that a caller may pass, of at least one part each.
    corrupt: name -> bytes that must raise MediaError. The bytes of all samples are also truncated
        and damaged, which may raise MediaError and nothing else.
    options: the engine's mm_processor_kwargs for the factory.
    """

    checks = splitters.CHECKS
    spec: ClassVar[MediaProcessorSpec]
    samples: ClassVar[Mapping[str, Any] | None] = None
    corrupt: ClassVar[Mapping[str, bytes]] = CORRUPT
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, tmp_path_factory: pytest.TempPathFactory) -> Any:
        """The argument of the checks; `subject.splitter` is built once per class."""
        subject = splitters.SplitterSubject(
            spec=cls.spec,
            checkpoint=checkpoint_of(cls.spec, tmp_path_factory.mktemp("checkpoint")),
            samples=cls.samples,
            corrupt=cls.corrupt,
            options=cls.options,
        )
        yield subject
        subject.close()
