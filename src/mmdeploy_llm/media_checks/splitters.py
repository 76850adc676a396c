"""Checks of a splitter, which makes several items of another kind of an item."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from mmdeploy_llm.errors import MediaError, MediaLimitError
from mmdeploy_llm.hooks import (
    Checkpoint,
    MediaLimits,
    MediaProcessorSpec,
    MediaSplitter,
    SplitPart,
)
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.model_checks.base import (
    Check,
    CheckFailed,
    CheckSkipped,
    attributed,
    demand,
    factory_of,
)

from . import samples as generated

UNKNOWN = "no_such_option_of_any_kind"
RAISE = "raise MediaError from mmdeploy_llm.errors"
LIMIT = "raise MediaLimitError, as limits.check_bytes does, and do not convert it"
NUM_CUTS = 12


@dataclass(kw_only=True)
class SplitterSubject:
    """A splitter to check; see SplitterConformance for the fields."""

    spec: MediaProcessorSpec
    checkpoint: Checkpoint
    samples: Mapping[str, Any] | None = None
    corrupt: Mapping[str, bytes] = field(default_factory=lambda: dict(generated.CORRUPT))
    options: Mapping[str, Any] = field(default_factory=dict)
    limits: MediaLimits = field(default_factory=MediaLimits)

    @cached_property
    def splitter(self) -> MediaSplitter:
        """The splitter that all checks share."""
        with attributed(
            f"{self.spec.factory}(checkpoint, {dict(self.options)!r})",
            "a splitter's factory is called as factory(checkpoint, options)",
        ):
            built = factory_of(self.spec)(self.checkpoint, dict(self.options))
        demand(
            isinstance(built, MediaSplitter),
            f"{self.spec.factory} builds a {type(built).__name__}, and the spec says "
            f"yields={self.spec.yields!r}; derive it from mmdeploy_llm.hooks.MediaSplitter",
        )
        return built  # type: ignore[no-any-return]

    def sources(self) -> Mapping[str, Any]:
        """Returns the samples. Raises CheckSkipped when there are none."""
        given = self.samples if self.samples is not None else generated.samples(self.spec.kind)
        if not given:
            raise CheckSkipped("no samples were given; add some to `samples` (SplitterConformance)")
        return given

    def parts(self, source: Any, limits: MediaLimits | None = None) -> list[SplitPart]:
        """Splits an item and makes all of its parts."""
        found = self.splitter.split(source, {}, limits or self.limits)
        return [found[index] for index in range(len(found))]

    def all_parts(self) -> Iterator[tuple[str, Sequence[SplitPart], list[SplitPart]]]:
        """Yields the name of a sample, the sequence that the splitter returns, and its parts."""
        for name, source in self.sources().items():
            with attributed(f"splitting sample {name!r}", "split what `samples` lists"):
                found = self.splitter.split(source, {}, self.limits)
                parts = [found[index] for index in range(len(found))]
            yield name, found, parts

    def close(self) -> None:
        """Closes the splitter, if it was built."""
        if "splitter" in self.__dict__:
            self.splitter.close()


def builds_a_splitter(subject: SplitterSubject) -> None:
    """The factory builds a MediaSplitter of the spec's kind, with markers."""
    splitter, spec = subject.splitter, subject.spec
    kind = getattr(splitter, "kind", None)
    demand(kind == spec.kind, f"its kind is {kind!r}, the spec's is {spec.kind!r}; give one name")
    markers = splitter.markers
    is_valid = isinstance(markers, tuple) and all(isinstance(it, str) and it for it in markers)
    demand(
        is_valid and markers,
        f"markers is {markers!r}; give a tuple of texts, such as ('<|{spec.kind}|>',)",
    )


def parts_are_a_sequence(subject: SplitterSubject) -> None:
    """`len` is the number of parts, each of which is a SplitPart with a source and a label."""
    for name, found, parts in subject.all_parts():
        demand(parts, f"sample {name!r} has no parts; {RAISE} for an item without any")
        for index, part in enumerate(parts):
            where = f"part {index} of sample {name!r}"
            demand(
                isinstance(part, SplitPart) and part.source is not None and part.label,
                f"{where} is {part!r:.200}; return SplitPart(source=..., label='page 1')",
            )
            if hasattr(found, "label"):
                told = found.label(index)
                demand(
                    told == part.label,
                    f"label({index}) says {told!r}, {where} is {part.label!r}; give one name",
                )
        try:
            found[len(found)]
        except IndexError:
            continue
        except Exception as error:
            raise CheckFailed(
                f"[len] of sample {name!r} raised {error_text(error)}; raise IndexError"
            ) from error
        raise CheckFailed(f"[len] of sample {name!r} returns a part; raise IndexError")


def splits_the_same_twice(subject: SplitterSubject) -> None:
    """The same item has the same parts each time: caches of encoded media rely on it."""
    for name, _, parts in subject.all_parts():
        again = subject.parts(subject.sources()[name])
        labels = [part.label for part in parts], [part.label for part in again]
        demand(
            labels[0] == labels[1],
            f"sample {name!r} is split into {labels[0]}, then {labels[1]}; keep one order",
        )
        for one, two in zip(parts, again, strict=True):
            is_equal = not isinstance(one.source, bytes) or one.source == two.source
            demand(is_equal, f"{one.label!r} of sample {name!r} has other bytes the second time")


def unknown_options_are_refused(subject: SplitterSubject) -> None:
    """An option that the splitter does not know is a MediaError: a typo is not ignored."""
    name, source = next(iter(subject.sources().items()))
    with attributed(f"splitting sample {name!r} with an unknown option", RAISE):
        try:
            subject.splitter.split(source, {UNKNOWN: 1}, subject.limits)
        except MediaError:
            return
    raise CheckFailed(f"the option {UNKNOWN!r} is ignored; {RAISE}, and name those there are")


def damage_is_a_media_error(subject: SplitterSubject) -> None:
    """Broken, truncated and damaged bytes raise MediaError and nothing else, here or in a part."""
    for name, blob in subject.corrupt.items():
        with attributed(f"splitting {name!r}", RAISE):
            try:
                subject.parts(blob)
            except MediaError:
                continue
        raise CheckFailed(f"{name!r} is split without an error; {RAISE}")
    given = {} if subject.samples is None else subject.samples
    for name, source in given.items():
        for what, blob in _damaged(source):
            told = f"splitting sample {name!r} {what}"
            with attributed(told, RAISE), suppress(MediaError):
                subject.parts(blob)


def bytes_of_parts_are_limited(subject: SplitterSubject) -> None:
    """A part whose bytes are over max_bytes is refused: a few bytes may unpack to gigabytes."""
    largest = {
        name: max((len(it.source) for it in parts if isinstance(it.source, bytes)), default=0)
        for name, _, parts in subject.all_parts()
    }
    if not any(largest.values()):
        raise CheckSkipped("no part is bytes: nothing to add")
    for name, size in largest.items():
        if size:
            limits = replace(subject.limits, max_bytes=size - 1)
            with attributed(f"a part of {size} bytes with max_bytes={size - 1}", LIMIT):
                try:
                    subject.parts(subject.sources()[name], limits)
                except MediaLimitError:
                    continue
            raise CheckFailed(
                f"sample {name!r} gives a part of {size} bytes with max_bytes={size - 1}; read no "
                "more than limits.max_bytes + 1 and call limits.check_bytes"
            )


def _damaged(source: Any) -> Iterator[tuple[str, bytes]]:
    """Yields truncated and overwritten forms of bytes."""
    if isinstance(source, bytes):
        for step in range(1, NUM_CUTS):
            at = len(source) * step // NUM_CUTS
            yield f"cut at byte {at}", source[:at]
            yield f"with zeros from byte {at}", source[:at] + bytes(16) + source[at + 16 :]


CHECKS: tuple[Check, ...] = (
    builds_a_splitter,
    parts_are_a_sequence,
    splits_the_same_twice,
    unknown_options_are_refused,
    damage_is_a_media_error,
    bytes_of_parts_are_limited,
)
