"""The pytest class that runs the checks of media processors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import pytest

from mmdeploy_llm.hooks import Checkpoint, MediaLimits, MediaProcessorSpec
from mmdeploy_llm.testing.media import processors
from mmdeploy_llm.testing.media.subject import Options, ProcessorSubject, checkpoint_of
from mmdeploy_llm.testing.media.truth import Reference, transformers_truth

from .conformance import Conformance


class MediaProcessorConformance(Conformance):
    """Tests a media processor.

    Every attribute but `spec` has a default for images or videos in common file formats. For other
    kinds of media, set at least `samples`, `corrupt` and `too_large`.

    spec: the processor.
    samples: name -> a source that a caller may pass: bytes of a file, or a loaded object. At least
        two, of different content.
    corrupt: name -> bytes that must raise MediaError. The bytes of all samples are also truncated
        and damaged, which may raise MediaError and nothing else.
    too_large: name -> (source, limits) that must raise MediaLimitError in `decode`. A file that is
        truncated after its header shows that limits are checked before decoding.
    options: the engine's mm_processor_kwargs for the factory.
    other_options: options of the engine that change results; each alone must change the key where
        it changes the result. Several dicts are tried one by one. None: there are no options.
    item_options: the same for options of one item, such as a video's fps.
    twins: name -> two sources that differ in a few bytes only, such as the last.
    giants: name -> a few bytes whose header claims a giant; they must be refused.
    reference_options: pairs (name of a sample, options of the item) with which results must equal
        the reference's too.
    pixel_tolerance: largest allowed difference of a value of a tensor from the reference's.
    make_reference: override it for a reference of your own, which is called with (source, options,
        markers) and returns a MediaTruth; by default it is transformers' processor of the
        checkpoint.
    """

    checks = processors.CHECKS
    spec: ClassVar[MediaProcessorSpec]
    samples: ClassVar[Mapping[str, Any] | None] = None
    corrupt: ClassVar[Mapping[str, bytes] | None] = None
    too_large: ClassVar[Mapping[str, tuple[Any, MediaLimits]] | None] = None
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    other_options: ClassVar[Options] = None
    item_options: ClassVar[Options] = None
    twins: ClassVar[Mapping[str, tuple[Any, Any]] | None] = None
    giants: ClassVar[Mapping[str, bytes] | None] = None
    reference_options: ClassVar[Sequence[tuple[str, Mapping[str, Any]]]] = ()
    pixel_tolerance: ClassVar[float] = 1e-5

    @classmethod
    def checkpoint(cls, folder: Path) -> Checkpoint:
        """Returns the checkpoint for the factory; `folder` is empty and writable. By default it
        has the files of the tiny checkpoint of an installed model that the spec names, without
        weights, or nothing."""
        return checkpoint_of(cls.spec, folder)

    @staticmethod
    def make_reference(kind: str, checkpoint: Checkpoint) -> Reference:
        """Returns the reference. Raises CheckSkipped when there is none."""
        return transformers_truth(kind, checkpoint)

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, tmp_path_factory: pytest.TempPathFactory) -> Any:
        """The argument of the checks; `subject.processor` is built once per class."""
        subject = ProcessorSubject(
            spec=cls.spec,
            checkpoint=cls.checkpoint(tmp_path_factory.mktemp("checkpoint")),
            samples=cls.samples,
            corrupt=cls.corrupt,
            too_large=cls.too_large,
            options=cls.options,
            other_options=cls.other_options,
            item_options=cls.item_options,
            twins=cls.twins,
            giants=cls.giants,
            reference_options=cls.reference_options,
            pixel_tolerance=cls.pixel_tolerance,
            make_reference=cls.make_reference,
        )
        yield subject
        subject.close()
