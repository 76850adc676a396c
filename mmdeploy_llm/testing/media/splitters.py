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
from mmdeploy_llm.testing.models.base import (
    Check,
    CheckFailed,
    CheckSkipped,
    attributed,
    demand,
    factory_of,
)

from . import samples as generated
from .company import at_once

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

    @cached_property
    def _sources(self) -> Mapping[str, Any]:
        return generated.samples(self.spec.kind) if self.samples is None else self.samples

    def sources(self) -> Mapping[str, Any]:
        """Returns the samples, those that the kit makes where none are given. Raises CheckSkipped
        when there are none."""
        if not self._sources:
            raise CheckSkipped("no samples were given; add some to `samples` (SplitterConformance)")
        return self._sources

    def documents(self) -> dict[str, bytes]:
        """Returns the samples that are bytes."""
        return {name: it for name, it in self._sources.items() if isinstance(it, bytes)}

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
        for index, what in ((len(found), "[len]"), (-len(found) - 1, "[-len - 1]")):
            _demand_index_error(found, index, f"{what} of sample {name!r}")


def _demand_index_error(found: Sequence[SplitPart], index: int, what: str) -> None:
    try:
        found[index]
    except IndexError:
        return
    except Exception as error:
        raise CheckFailed(f"{what} raised {error_text(error)}; raise IndexError") from error
    raise CheckFailed(f"{what} returns a part; raise IndexError")


def negative_indices_count_from_the_end(subject: SplitterSubject) -> None:
    """`[-1]` is the last part, `[-len]` the first, as of every sequence."""
    for name, found, parts in subject.all_parts():
        for index in (-1, -len(parts)):
            with attributed(f"[{index}] of sample {name!r}", "count from the end"):
                part = found[index]
            demand(
                _is_same(part, parts[index]),
                f"[{index}] of sample {name!r} is {part!r:.120}, and [{len(parts) + index}] is "
                f"{parts[index]!r:.120}; count from the end, or keep to collections.abc.Sequence "
                "and range(len(self))[index]",
            )


def threads_get_the_same_parts(subject: SplitterSubject) -> None:
    """Eight threads that split the same items at once, and that read one sequence, get the same
    parts as one."""
    expected = [(name, found, parts) for name, found, parts in subject.all_parts()]

    def work(number: int) -> list[tuple[str, str, list[SplitPart], list[SplitPart]]]:
        made, first = [], number % max(1, len(expected))
        for name, found, parts in expected[first:] + expected[:first]:  # different ones at a time
            own = subject.parts(subject.sources()[name])
            shared = [found[index] for index in range(len(found))]
            made += [(name, "its own split", own, parts), (name, "a shared split", shared, parts)]
        return made

    with attributed("splitting in eight threads", "keep the state of an item out of `self`"):
        results = at_once(work)
    for name, what, made, parts in (each for result in results for each in result):
        demand(
            len(made) == len(parts) and all(map(_is_same, made, parts)),
            f"sample {name!r} has other parts in {what} with eight concurrent threads; keep the "
            "state of an item in local variables, and guard what is shared with a lock",
        )


def _is_same(one: SplitPart, two: SplitPart) -> bool:
    """Whether two parts have one label and the same bytes; other sources are not looked into."""
    both = isinstance(one.source, bytes) and isinstance(two.source, bytes)
    return one.label == two.label and (not both or one.source == two.source)


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
            told = f"{one.label!r} of sample {name!r} has other bytes the second time"
            demand(_is_same(one, two), told)


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
    for name, source in subject.documents().items():
        for what, blob in _damaged(source):
            told = f"splitting sample {name!r} {what}"
            with attributed(told, RAISE), suppress(MediaError):
                subject.parts(blob)


def bytes_of_the_document_are_limited(subject: SplitterSubject) -> None:
    """A document of exactly max_bytes is split, a larger one is a MediaLimitError: its bytes may
    come from anywhere, and nothing else looks at their number."""
    if not subject.documents():
        raise CheckSkipped("no sample is bytes; add a file of the kind to `samples`")
    for name, blob in subject.documents().items():
        most = max(len(blob), *(_size(part) for part in subject.parts(blob)))
        with attributed(f"sample {name!r} with max_bytes={most}", "allow exactly max_bytes"):
            subject.parts(blob, replace(subject.limits, max_bytes=most))
        limits = replace(subject.limits, max_bytes=len(blob) - 1)
        what = f"sample {name!r} of {len(blob)} bytes with max_bytes={len(blob) - 1}"
        with attributed(what, LIMIT):
            try:
                subject.splitter.split(blob, {}, limits)
            except MediaLimitError:
                continue
        raise CheckFailed(f"{what} is split; call limits.check_bytes(len(source), ...) in `split`")


def bytes_of_parts_are_limited(subject: SplitterSubject) -> None:
    """A part whose bytes are over max_bytes is refused: a few bytes may unpack to gigabytes."""
    largest = {name: max(map(_size, parts), default=0) for name, _, parts in subject.all_parts()}
    if not any(largest.values()):
        raise CheckSkipped("no part is bytes: nothing to add")
    documents = subject.documents()
    # Else the limit of the document would be met first.
    unpacked = {
        name: size for name, size in largest.items() if size > len(documents.get(name, b"")) > 0
    }
    if not unpacked:
        raise CheckSkipped("no sample has a part larger than itself; add one that unpacks to more")
    for name, size in unpacked.items():
        limits = replace(subject.limits, max_bytes=size - 1)
        with attributed(f"a part of {size} bytes with max_bytes={size - 1}", LIMIT):
            try:
                subject.parts(documents[name], limits)
            except MediaLimitError:
                continue
        raise CheckFailed(
            f"sample {name!r} gives a part of {size} bytes with max_bytes={size - 1}; read no "
            "more than limits.max_bytes + 1 and call limits.check_bytes"
        )


def _size(part: SplitPart) -> int:
    """Returns the bytes of a part, 0 for one that is something else."""
    return len(part.source) if isinstance(part.source, bytes) else 0


def _damaged(source: bytes) -> Iterator[tuple[str, bytes]]:
    """Yields truncated and overwritten forms of bytes."""
    for step in range(1, NUM_CUTS):
        at = len(source) * step // NUM_CUTS
        yield f"cut at byte {at}", source[:at]
        yield f"with zeros from byte {at}", source[:at] + bytes(16) + source[at + 16 :]


CHECKS: tuple[Check, ...] = (
    builds_a_splitter,
    parts_are_a_sequence,
    negative_indices_count_from_the_end,
    splits_the_same_twice,
    threads_get_the_same_parts,
    unknown_options_are_refused,
    damage_is_a_media_error,
    bytes_of_the_document_are_limited,
    bytes_of_parts_are_limited,
)
