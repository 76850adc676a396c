"""The subject of the checks of a splitter, and what its parts are compared by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmdeploy_llm.hooks import (
    Checkpoint,
    MediaLimits,
    MediaProcessorSpec,
    MediaSplitter,
    SplitPart,
)
from mmdeploy_llm.media import DecodedImage, Drawing
from mmdeploy_llm.testing.models.base import CheckSkipped, attributed, demand, factory_of

from . import samples as generated
from .subject import Options, choices_of

DRAWN_SIDE = 256  # pixels of the longer side of what is drawn to be compared


@dataclass(kw_only=True)
class SplitterSubject:
    """A splitter to check; see SplitterConformance for the fields."""

    spec: MediaProcessorSpec
    checkpoint: Checkpoint
    samples: Mapping[str, Any] | None = None
    corrupt: Mapping[str, bytes] = field(default_factory=lambda: dict(generated.CORRUPT))
    too_large: Mapping[str, tuple[Any, MediaLimits]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    other_options: Options = None
    item_options: Options = None
    twins: Mapping[str, tuple[Any, Any]] | None = None
    giants: Mapping[str, bytes] = field(default_factory=dict)
    limits: MediaLimits = field(default_factory=MediaLimits)

    def __post_init__(self) -> None:
        self._built: list[MediaSplitter] = []
        if self.twins is None:
            self.twins = {} if self.samples is not None else generated.twins(self.spec.kind)

    @cached_property
    def splitter(self) -> MediaSplitter:
        """The splitter that all checks share."""
        return self.build({})

    def build(self, others: Mapping[str, Any]) -> MediaSplitter:
        """Builds a splitter with the engine's options and others; `close` closes it."""
        given = {**self.options, **others}
        with attributed(
            f"{self.spec.factory}(checkpoint, {given!r})",
            "a splitter's factory is called as factory(checkpoint, options)",
        ):
            built = factory_of(self.spec)(self.checkpoint, given)
        demand(
            isinstance(built, MediaSplitter),
            f"{self.spec.factory} builds a {type(built).__name__}, and the spec says "
            f"yields={self.spec.yields!r}; derive it from mmdeploy_llm.hooks.MediaSplitter",
        )
        self._built.append(built)
        return built  # type: ignore[no-any-return]

    @cached_property
    def _sources(self) -> Mapping[str, Any]:
        return generated.samples(self.spec.kind) if self.samples is None else self.samples

    def sources(self) -> Mapping[str, Any]:
        """Returns the samples, those that the kit makes where none are given. Raises CheckSkipped
        when there are none."""
        if not self._sources:
            raise CheckSkipped("no samples were given; add some to `samples` (SplitterConformance)")
        return self._sources

    @property
    def item_choices(self) -> tuple[Mapping[str, Any], ...]:
        """The options of an item that are tried: those of `item_options`, each alone too."""
        return choices_of(self.item_options)

    @property
    def other_choices(self) -> tuple[Mapping[str, Any], ...]:
        """The options of an engine that are tried: those of `other_options`, each alone too."""
        return choices_of(self.other_options)

    def documents(self) -> dict[str, bytes]:
        """Returns the samples that are bytes."""
        return {name: it for name, it in self._sources.items() if isinstance(it, bytes)}

    def files(self) -> dict[str, Path]:
        """Returns the samples that are paths."""
        return {name: it for name, it in self._sources.items() if isinstance(it, Path)}

    def parts(
        self,
        source: Any,
        limits: MediaLimits | None = None,
        options: Mapping[str, Any] | None = None,
        splitter: MediaSplitter | None = None,
    ) -> list[SplitPart]:
        """Splits an item and makes all of its parts."""
        own = splitter or self.splitter
        found = own.split(source, dict(options or {}), limits or self.limits)
        return [found[index] for index in range(len(found))]

    def all_parts(self) -> Iterator[tuple[str, Sequence[SplitPart], list[SplitPart]]]:
        """Yields the name of a sample, the sequence that the splitter returns, and its parts."""
        for name, source in self.sources().items():
            with attributed(f"splitting sample {name!r}", "split what `samples` lists"):
                found = self.splitter.split(source, {}, self.limits)
                parts = [found[index] for index in range(len(found))]
            yield name, found, parts

    def close(self) -> None:
        """Closes all splitters that were built."""
        while self._built:
            self._built.pop().close()


def is_same(one: SplitPart, two: SplitPart) -> bool:
    """Whether two parts have one label and the same content."""
    return one.label == two.label and has_content_of(one, two)


def has_content_of(one: SplitPart, two: SplitPart) -> bool:
    """Whether two parts have the same options, and sources that a processor cannot tell apart;
    those of a type of the splitter's own are not looked into."""
    first, other = one.source, two.source
    if type(first) is not type(other) or dict(one.options) != dict(two.options):
        return False
    if isinstance(first, Image.Image):
        return bool(first.size == other.size and first.tobytes() == other.tobytes())
    if isinstance(first, np.ndarray):
        return np.array_equal(first, other)
    if isinstance(first, (Drawing, DecodedImage)):
        return (first.digest, first.size) == (other.digest, other.size)
    return not isinstance(first, (bytes, str, Path)) or bool(first == other)


def drawn(part: SplitPart, limits: MediaLimits, side: int = DRAWN_SIDE) -> np.ndarray[Any, Any]:
    """Returns the pixels of a part that is drawn, as a small picture, or was decoded."""
    source = part.source
    if isinstance(source, DecodedImage):
        return np.asarray(source.image)
    share = min(1.0, side / max(source.size))
    width, height = (max(1, round(length * share)) for length in source.size)
    return np.asarray(source.draw((width, height), limits))
