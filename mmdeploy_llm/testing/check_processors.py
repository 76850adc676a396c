"""Checks media processors, as check_plugin does: on generated media of their kind, with the files
of a checkpoint where there is one. Its imports take seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mmdeploy_llm.errors import MediaError, ModelNotSupportedError
from mmdeploy_llm.hooks import Checkpoint, MediaProcessorSpec, PluginManager
from mmdeploy_llm.hooks.names import normalise
from mmdeploy_llm.hooks.records import FAULTS, describe
from mmdeploy_llm.hooks.selection import ANY_MODEL
from mmdeploy_llm.testing.media import processors, splitters
from mmdeploy_llm.testing.media.splitter_subject import SplitterSubject
from mmdeploy_llm.testing.media.subject import ProcessorSubject, checkpoint_of
from mmdeploy_llm.testing.models.base import CheckFailed

from .verdicts import Verdict, run, skipped


def check_processor(
    spec: MediaProcessorSpec, checkpoint: Checkpoint | None, fields: Mapping[str, Any]
) -> Iterator[Verdict]:
    """Yields the verdicts of a processor or splitter."""
    what = describe(spec)
    with ExitStack() as stack:
        if checkpoint is not None and not _serves(spec, checkpoint):
            yield skipped("builds", what, "the processor is for other models than the folder's")
            return
        folder = Path(stack.enter_context(TemporaryDirectory()))
        given = checkpoint or checkpoint_of(spec, folder)
        if spec.yields is not None:
            one = SplitterSubject(spec=spec, checkpoint=given, **fields)
            stack.callback(one.close)
            yield from run(splitters.CHECKS, what, one)
            return
        subject = ProcessorSubject(spec=spec, checkpoint=given, **fields)
        stack.callback(subject.close)
        try:
            subject.samples = _readable_samples(subject)
        except CheckFailed as failure:
            if checkpoint is None:
                yield skipped("builds", what, f"{failure}; give a model folder to build it with")
                return
            subject.samples = {}
        if not subject.samples:
            subject.too_large = {}
        yield from run(processors.CHECKS, what, subject)


def _readable_samples(subject: ProcessorSubject) -> Mapping[str, Any]:
    """Returns the samples that are given, or the generated media that the processor can read: not
    every image processor reads image files."""
    processor, readable = subject.processor, {}
    given = subject.samples or {}
    if not subject.has_generated_samples:
        return given
    for name, source in given.items():
        try:
            processor.decode(source, subject.limits)
        except MediaError:
            continue
        except FAULTS:
            pass  # the checks will report it
        readable[name] = source
    return readable


def _serves(spec: MediaProcessorSpec, checkpoint: Checkpoint) -> bool:
    """Returns whether the processor is for the checkpoint's family, from whatever plugin."""
    try:
        config = checkpoint.config
        family = PluginManager.load().model_for(config.architectures or (), config).name
    except ModelNotSupportedError:
        return ANY_MODEL in spec.models
    return bool({normalise(family), ANY_MODEL} & set(map(normalise, spec.models)))
