"""The subject of the checks of a media processor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mmdeploy_llm.hooks import (
    Checkpoint,
    MediaInput,
    MediaLimits,
    MediaProcessor,
    MediaProcessorSpec,
)
from mmdeploy_llm.testing.models.base import CheckSkipped, attributed, demand, factory_of
from mmdeploy_llm.testing.tiny import families, family_of, write_without_weights
from mmdeploy_llm.weights.folder import read_checkpoint

from . import samples as generated
from .truth import (
    GIVE_YOUR_OWN,
    MediaTruth,
    Reference,
    TransformersVideos,
    transformers_truth,
)

Options = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None


@dataclass(kw_only=True)
class ProcessorSubject:
    """A processor to check; see MediaProcessorConformance for the fields."""

    spec: MediaProcessorSpec
    checkpoint: Checkpoint
    samples: Mapping[str, Any] | None = None
    corrupt: Mapping[str, bytes] | None = None
    too_large: Mapping[str, tuple[Any, MediaLimits]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    other_options: Options = None
    item_options: Options = None
    limits: MediaLimits = field(default_factory=MediaLimits)
    twins: Mapping[str, tuple[Any, Any]] | None = None
    giants: Mapping[str, bytes] | None = None
    make_reference: Callable[[str, Checkpoint], Reference] = transformers_truth
    reference_options: Sequence[tuple[str, Mapping[str, Any]]] = ()
    pixel_tolerance: float = 1e-5

    def __post_init__(self) -> None:
        self._built: list[MediaProcessor] = []
        self._made: dict[str, MediaInput] = {}
        self._truths: dict[tuple[str, str], MediaTruth] = {}
        self.has_generated_samples = self.samples is None
        if self.too_large is None:
            self.too_large = {} if self.samples is not None else generated.too_large(self.spec.kind)
        if self.twins is None:
            self.twins = {} if self.samples is not None else generated.twins(self.spec.kind)
        if self.giants is None:
            self.giants = {} if self.samples is not None else generated.giants(self.spec.kind)
        if self.samples is None:
            self.samples = generated.samples(self.spec.kind)
        if self.corrupt is None:
            self.corrupt = generated.CORRUPT

    @cached_property
    def processor(self) -> MediaProcessor:
        """The processor that all checks share, as the threads of an engine do."""
        return self.build()

    def build(self, options: Mapping[str, Any] | None = None) -> MediaProcessor:
        """Builds another processor; `close` closes it."""
        given = dict(self.options if options is None else options)
        with attributed(
            f"{self.spec.factory}(checkpoint, {given!r})",
            "a processor's factory is called as factory(checkpoint, options); if it needs files "
            "or a config, provide them in the test class's `checkpoint`",
        ):
            built = factory_of(self.spec)(self.checkpoint, given)
        demand(
            isinstance(built, MediaProcessor),
            f"{self.spec.factory} builds a {type(built).__name__}; derive it from "
            "mmdeploy_llm.hooks.MediaProcessor",
        )
        self._built.append(built)
        return built  # type: ignore[no-any-return]

    def sources(self) -> Mapping[str, Any]:
        """Returns the samples. Raises CheckSkipped when there are none."""
        if not self.samples:
            raise CheckSkipped("no samples were given; add some to `samples`")
        return self.samples

    @cached_property
    def reference(self) -> Reference:
        """The reference of the checkpoint, by default transformers' processor. Raises CheckSkipped
        where there is none."""
        found = self.make_reference(self.spec.kind, self.checkpoint)
        if isinstance(found, TransformersVideos) and self.options:
            raise CheckSkipped(
                "transformers' video processor has the checkpoint's options, not `options` of the "
                f"engine; {GIVE_YOUR_OWN}"
            )
        return found

    def truth(self, name: str, options: Mapping[str, Any] | None = None) -> MediaTruth:
        """Returns what the reference makes of a sample."""
        key = name, repr(options)
        if key not in self._truths:
            markers = (*self.processor.markers, self.processor.token)
            self._truths[key] = self.reference(self.sources()[name], options or {}, markers)
        return self._truths[key]

    @property
    def item_choices(self) -> tuple[Mapping[str, Any], ...]:
        """The options of an item that are tried: those of `item_options`, each alone too."""
        return choices_of(self.item_options)

    @property
    def other_choices(self) -> tuple[Mapping[str, Any], ...]:
        """The options of an engine that are tried: those of `other_options`, each alone too."""
        return choices_of(self.other_options)

    def encoded(self) -> dict[str, bytes]:
        """Returns the samples that are bytes."""
        return {name: it for name, it in self.sources().items() if isinstance(it, bytes)}

    def made(self, name: str) -> MediaInput:
        """Returns the model inputs of a sample, computed once for all checks."""
        if name not in self._made:
            self._made[name] = self.run(name)
        return self._made[name]

    def run(
        self,
        name: str,
        processor: MediaProcessor | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> MediaInput:
        """Decodes and processes a sample; returns its model inputs."""
        return self.run_source(f"sample {name!r}", self.sources()[name], processor, options)

    def run_source(
        self,
        what: str,
        source: Any,
        processor: MediaProcessor | None = None,
        options: Mapping[str, Any] | None = None,
        limits: MediaLimits | None = None,
    ) -> MediaInput:
        """Decodes and processes a source that messages call `what`; returns its model inputs."""
        processor = processor or self.processor
        with attributed(f"{what}: decode and process", "every sample must be readable"):
            item = processor.decode(source, limits or self.limits)
            made = processor.process(item, dict(options or {}))
        demand(
            isinstance(made, MediaInput),
            f"{what}: process returns a {type(made).__name__}; return a MediaInput",
        )
        return made

    def within(self, source: Any, limits: MediaLimits) -> MediaInput:
        """Decodes and processes a source within limits; raises what the processor raises."""
        return self.processor.process(self.processor.decode(source, limits), {})

    def close(self) -> None:
        """Closes all processors that `build` has built."""
        while self._built:
            self._built.pop().close()


def checkpoint_of(spec: MediaProcessorSpec, folder: Path) -> Checkpoint:
    """Writes the files, without weights, of the tiny checkpoint of an installed model that the spec
    serves; returns a checkpoint without files where there is none."""
    known = families()
    name = next((name for name in spec.models if name in known), None)
    if name is None:
        return Checkpoint(folder=folder, config=SimpleNamespace())
    return read_checkpoint(write_without_weights(family_of(known[name]), folder))


def choices_of(given: Options) -> tuple[Mapping[str, Any], ...]:
    """Returns each of several sets of options, or the one set and each of its options alone."""
    if given is None:
        return ()
    if not isinstance(given, Mapping):
        return tuple(given)
    alone = ({name: value} for name, value in given.items()) if len(given) > 1 else ()
    return (given, *alone)
