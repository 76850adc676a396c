"""The pytest class that runs the checks of splitters."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import pytest

from mmdeploy_llm.hooks import MediaLimits, MediaProcessorSpec
from mmdeploy_llm.testing.media import splitters
from mmdeploy_llm.testing.media.samples import CORRUPT
from mmdeploy_llm.testing.media.splitter_subject import SplitterSubject
from mmdeploy_llm.testing.media.subject import Options, checkpoint_of

from .conformance import Conformance


class SplitterConformance(Conformance):
    """Tests a splitter: a media processor whose spec has `yields`.

    spec: the splitter.
    samples: name -> a source that a caller may pass, of at least one part each.
    corrupt: name -> bytes that must raise MediaError. The bytes of all samples are also truncated
        and damaged, which may raise MediaError and nothing else.
    too_large: name -> (source, limits) that must raise MediaLimitError, at once or in a part.
    options, other_options, item_options: as of MediaProcessorConformance; they must change parts,
        and the digest of what is drawn.
    twins: name -> two sources that differ in a few bytes, and must have other parts.
    giants: name -> a few bytes whose header claims a giant; they must be refused.
    """

    checks = splitters.CHECKS
    spec: ClassVar[MediaProcessorSpec]
    samples: ClassVar[Mapping[str, Any] | None] = None
    corrupt: ClassVar[Mapping[str, bytes]] = CORRUPT
    too_large: ClassVar[Mapping[str, tuple[Any, MediaLimits]]] = MappingProxyType({})
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    other_options: ClassVar[Options] = None
    item_options: ClassVar[Options] = None
    twins: ClassVar[Mapping[str, tuple[Any, Any]] | None] = None
    giants: ClassVar[Mapping[str, bytes]] = MappingProxyType({})

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, tmp_path_factory: pytest.TempPathFactory) -> Any:
        """The argument of the checks; `subject.splitter` is built once per class."""
        subject = SplitterSubject(
            spec=cls.spec,
            checkpoint=checkpoint_of(cls.spec, tmp_path_factory.mktemp("checkpoint")),
            samples=cls.samples,
            corrupt=cls.corrupt,
            too_large=cls.too_large,
            options=cls.options,
            other_options=cls.other_options,
            item_options=cls.item_options,
            twins=cls.twins,
            giants=cls.giants,
        )
        yield subject
        subject.close()
