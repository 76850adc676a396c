"""The subject of the checks of a media processor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mmdeploy_llm.hooks import (
    Checkpoint,
    MediaInput,
    MediaLimits,
    MediaProcessor,
    MediaProcessorSpec,
)
from mmdeploy_llm.model_checks.base import CheckSkipped, attributed, demand, factory_of

from . import samples as generated


@dataclass(kw_only=True)
class ProcessorSubject:
    """A processor to check; see MediaProcessorConformance for the fields."""

    spec: MediaProcessorSpec
    checkpoint: Checkpoint
    samples: Mapping[str, Any] | None = None
    corrupt: Mapping[str, bytes] | None = None
    too_large: Mapping[str, tuple[Any, MediaLimits]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    other_options: Mapping[str, Any] | None = None
    item_options: Mapping[str, Any] | None = None
    limits: MediaLimits = field(default_factory=MediaLimits)

    def __post_init__(self) -> None:
        self._built: list[MediaProcessor] = []
        self._made: dict[str, MediaInput] = {}
        if self.too_large is None:
            self.too_large = {} if self.samples is not None else generated.too_large(self.spec.kind)
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
        processor = processor or self.processor
        with attributed(f"sample {name!r}: decode and process", "every sample must be readable"):
            item = processor.decode(self.sources()[name], self.limits)
            made = processor.process(item, dict(options or {}))
        demand(
            isinstance(made, MediaInput),
            f"sample {name!r}: process returns a {type(made).__name__}; return a MediaInput",
        )
        return made

    def close(self) -> None:
        """Closes all processors that `build` has built."""
        while self._built:
            self._built.pop().close()
