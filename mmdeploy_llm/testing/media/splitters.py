"""Checks of a splitter, which makes several items of another kind of an item."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from mmdeploy_llm.errors import MediaError, MediaLimitError
from mmdeploy_llm.hooks import MediaSplitter, SplitPart
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.hooks.records import FAULTS
from mmdeploy_llm.media import DecodedImage, Drawing
from mmdeploy_llm.testing.models.base import (
    Check,
    CheckFailed,
    CheckSkipped,
    attributed,
    demand,
    since,
)

from . import links
from .company import SECONDS, at_once, package_of
from .limits import error_of, outside_of_a_root, refusal
from .pixel_limits import decoding, num_pixels
from .splitter_subject import SplitterSubject, drawn, is_same

UNKNOWN = "no_such_option_of_any_kind"
RAISE = "raise MediaError from mmdeploy_llm.errors"
LIMIT = "raise MediaLimitError, as limits.check_bytes does, and do not convert it"
NUM_CUTS = 12
NUM_READ = 20  # times that each thread reads a shared split, or as often as these seconds allow
NUM_DRAWN, SHOWN_SIDE = 4, 48  # parts of an item that are drawn; pixels of a side, in threads


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
                is_same(part, parts[index]),
                f"[{index}] of sample {name!r} is {part!r:.120}, and [{len(parts) + index}] is "
                f"{parts[index]!r:.120}; count from the end, or keep to collections.abc.Sequence "
                "and range(len(self))[index]",
            )


def threads_get_the_same_parts(subject: SplitterSubject) -> None:
    """Eight threads that split the same items at once, and that read one sequence, get the same
    parts as one, and draw the same pictures."""
    expected = [(name, found, parts) for name, found, parts in subject.all_parts()]
    pictures = [each for each in _all_drawings(subject, expected)]

    def work(number: int) -> list[tuple[str, str, bool]]:
        made, first, end = [], number % max(1, len(expected)), time.monotonic() + SECONDS
        for name, found, parts in expected[first:] + expected[:first]:  # different ones at a time
            own = subject.parts(subject.sources()[name])
            made.append((name, "its own split", _are_same(own, parts)))
            for _ in range(NUM_READ):
                shared = [found[index] for index in range(len(found))]
                made.append((name, "a shared split", _are_same(shared, parts)))
                if time.monotonic() > end:
                    break
        for name, part, pixels in pictures[number:] + pictures[:number]:
            again = drawn(part, subject.limits, SHOWN_SIDE)
            made.append((name, "what is drawn", np.array_equal(again, pixels)))
            if time.monotonic() > end:
                break
        return made

    with attributed("splitting in eight threads", "keep the state of an item out of `self`"):
        results = at_once(work, package_of(subject.splitter))
    for name, what, is_right in (each for result in results for each in result):
        demand(
            is_right,
            f"sample {name!r} has other parts in {what} with eight concurrent threads; keep the "
            "state of an item in local variables, and guard what is shared with a lock",
        )


def _are_same(made: Sequence[SplitPart], parts: Sequence[SplitPart]) -> bool:
    return len(made) == len(parts) and all(map(is_same, made, parts))


def _all_drawings(
    subject: SplitterSubject, found: Iterable[tuple[str, Sequence[SplitPart], list[SplitPart]]]
) -> Iterator[tuple[str, SplitPart, np.ndarray[Any, Any]]]:
    """Yields the first parts that are drawn, with their pixels."""
    drawings = ((name, part) for name, _, parts in found for part in parts)
    own = ((name, part) for name, part in drawings if isinstance(part.source, Drawing))
    for name, part in islice(own, NUM_DRAWN):
        with attributed(f"drawing {part.label!r} of sample {name!r}", "draw what is returned"):
            yield name, part, drawn(part, subject.limits, SHOWN_SIDE)


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
            demand(is_same(one, two), told)


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
    sizes = {name: len(blob) for name, blob in subject.documents().items()}
    sizes |= {name: it.stat().st_size for name, it in subject.files().items() if it.is_file()}
    if not sizes:
        raise CheckSkipped("no sample is bytes; add a file of the kind to `samples`")
    for name, size in sizes.items():
        source = subject.sources()[name]
        most = max(size, *(_size(part) for part in subject.parts(source)))
        with attributed(f"sample {name!r} with max_bytes={most}", "allow exactly max_bytes"):
            subject.parts(source, replace(subject.limits, max_bytes=most))
        limits = replace(subject.limits, max_bytes=size - 1)
        what = f"sample {name!r} of {size} bytes with max_bytes={size - 1}"
        with attributed(what, LIMIT):
            try:
                subject.splitter.split(source, {}, limits)
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


@since(1, 2)
def pixels_are_limited(subject: SplitterSubject) -> None:
    """No picture of more than max_pixels is decoded or drawn before its size was looked at; one of
    exactly as many is."""
    is_checked = False
    for name, source in subject.sources().items():
        with decoding() as sizes:
            whole = _pictures(subject.parts(source))
        if most := max((*sizes, *whole), default=0):
            is_checked = True
            for limit in (1, most - 1):
                _demand_limited(subject, name, limit)
        if sizes:
            with attributed(f"sample {name!r} with max_pixels={most}", "allow exactly max_pixels"):
                subject.parts(source, replace(subject.limits, max_pixels=most))
    if not is_checked:
        raise CheckSkipped("no part is a loaded picture, and none is decoded: nothing to add")


def _demand_limited(subject: SplitterSubject, name: str, limit: int) -> None:
    source, what = subject.sources()[name], f"sample {name!r} with max_pixels={limit}"
    limits = replace(subject.limits, max_pixels=limit)
    found: list[SplitPart] = []
    with decoding() as sizes:
        error_of(lambda: found.extend(subject.parts(source, limits)), what)
    most = max((*sizes, *_pictures(found)), default=0)
    demand(
        most <= limit,
        f"{what}: a picture of {most} pixels was made; raise MediaLimitError where the size in its "
        "header is over limits.max_pixels, before anything is decoded or drawn",
    )


def _pictures(parts: Iterable[SplitPart]) -> list[int]:
    """Returns the numbers of pixels of the parts that are loaded pictures."""
    sources = (part.source for part in parts)
    loaded = (own.image if isinstance(own, DecodedImage) else own for own in sources)
    return [number for it in loaded if not isinstance(it, bytes) and (number := num_pixels(it))]


def limits_are_respected(subject: SplitterSubject) -> None:
    """A source over a limit raises MediaLimitError, and a header that claims a giant MediaError,
    quickly and before it takes memory."""
    if not subject.too_large and not subject.giants:
        raise CheckSkipped("`too_large` and `giants` are empty; add sources over a limit to them")
    for name, (source, limits) in subject.too_large.items():
        own = (source, limits)
        found = refusal(lambda own=own: subject.parts(*own), f"too_large {name!r}")  # type: ignore[misc]
        how = f"raised {type(found).__name__}: {found}" if found else "was split"
        demand(
            isinstance(found, MediaLimitError),
            f"too_large {name!r} is over its limits, but {how}; raise MediaLimitError by the "
            "header, before the content is decoded",
        )
    for name, blob in subject.giants.items():
        what = f"a {name} header that claims a giant"
        found = refusal(lambda own=blob: subject.parts(own), what)  # type: ignore[misc]
        demand(found is not None, f"{what} was split; raise MediaLimitError")


@since(1, 2)
def options_change_the_parts(subject: SplitterSubject) -> None:
    """Options of an item or an engine have an effect, and what they draw in another way has another
    digest; so have other documents."""
    drawings: dict[tuple[str, tuple[int, int]], tuple[str, np.ndarray[Any, Any]]] = {}
    for name, _, parts in subject.all_parts():
        _demand_digests(subject, f"sample {name!r}", parts, drawings)
    for name, sources in (subject.twins or {}).items():
        one, two = (subject.parts(source) for source in sources)
        demand(
            not _are_same(one, two),
            f"{name} have the same parts, or parts of the same digests; use all of the content",
        )
        _demand_digests(subject, f"the first of {name}", one, drawings)
        _demand_digests(subject, f"the second of {name}", two, drawings)
    if not subject.item_choices and not subject.other_choices:
        raise CheckSkipped(
            "no options were given; add `other_options` of an engine, or `item_options` of an item"
        )
    for what, options, splitter in _choices(subject):
        is_used = False
        for name, _, parts in subject.all_parts():
            try:
                made = subject.parts(subject.sources()[name], options=options, splitter=splitter)
            except MediaError:
                continue  # this sample cannot have them
            told = f"sample {name!r} with {what}"
            # First, since what is drawn in another way may have the digest of the other.
            _demand_digests(subject, told, made, drawings)
            is_used |= not _are_same(made, parts)
        demand(
            is_used,
            f"with {what} every sample has the same parts as without; give options that have an "
            "effect, or have them change the parts, and the digest of what is drawn",
        )


def _choices(
    subject: SplitterSubject,
) -> Iterator[tuple[str, Mapping[str, Any], MediaSplitter | None]]:
    """Yields the options that are tried: what they are, those of an item, and the splitter."""
    for options in subject.item_choices:
        yield f"item_options {dict(options)!r}", options, None
    for options in subject.other_choices:
        yield f"other_options {dict(options)!r}", {}, subject.build(options)


def _demand_digests(
    subject: SplitterSubject,
    what: str,
    parts: Iterable[SplitPart],
    known: dict[tuple[str, tuple[int, int]], tuple[str, np.ndarray[Any, Any]]],
) -> None:
    """Demands that parts of one digest have the same pixels, also as all that are known."""
    for part in islice(parts, NUM_DRAWN):
        source = part.source
        if not isinstance(source, (Drawing, DecodedImage)):
            continue
        where = f"{part.label!r} of {what}"
        with attributed(f"drawing {where}", "draw what is returned"):
            pixels = drawn(part, subject.limits)
        key = source.digest, (source.size[0], source.size[1])
        other, first = known.setdefault(key, (where, pixels))
        demand(
            np.array_equal(pixels, first),
            f"{where} has the digest of {other}, and other pixels, so that a cache would return "
            "one's embeddings for the other; hash the content and all options into the digest",
        )


def files_outside_the_root_are_refused(subject: SplitterSubject) -> None:
    """A splitter that reads paths reads none outside `allowed_root`, neither by links."""
    if subject.splitter.wants_path:
        raise CheckSkipped("it gets paths that were compared with the root: see `links`")
    if not subject.documents():
        raise CheckSkipped("no sample is bytes, so no file was written; add one to `samples`")
    blob = next(iter(subject.documents().values()))
    whole = subject.parts(blob)
    with outside_of_a_root(blob) as (root, paths):
        limits = replace(subject.limits, allowed_root=root)
        for path in paths:
            try:
                is_read = _are_same(subject.parts(path, limits), whole)
            except FAULTS:
                continue
            demand(
                not is_read,
                f"the file {os.fspath(path)!r} was read, outside allowed_root {root}; take bytes "
                "only (intake has read them), or open files beneath limits.allowed_root",
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
    options_change_the_parts,
    damage_is_a_media_error,
    bytes_of_the_document_are_limited,
    bytes_of_parts_are_limited,
    pixels_are_limited,
    limits_are_respected,
    files_outside_the_root_are_refused,
    *links.OF_SPLITTERS,
)
