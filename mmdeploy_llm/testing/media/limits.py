"""Checks of a media processor: what it must refuse, in which time and memory, and that it reads no
file outside the folder that is allowed."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mmdeploy_llm.errors import MediaError, MediaLimitError
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.hooks.records import FAULTS
from mmdeploy_llm.testing.models.base import Check, CheckFailed, CheckSkipped, demand
from mmdeploy_llm.testing.plugins.bounded import Peak

from .keys import difference
from .subject import ProcessorSubject

NUM_DAMAGED = 4  # variants of each sample with changed bytes, and as many truncated ones
REFUSAL_SECONDS = 3.0  # a header is read in milliseconds; the rest is for a busy machine
REFUSAL_BYTES = 400 * 2**20  # for a first call too, which imports; a giant takes gigabytes


def corrupt_bytes_are_media_errors(subject: ProcessorSubject) -> None:
    """Bytes that cannot be read raise MediaError."""
    assert subject.corrupt is not None
    for name, blob in subject.corrupt.items():
        found = outcome(subject, blob, {}, f"corrupt bytes {name!r} ({len(blob)} bytes)")
        demand(
            isinstance(found, MediaError),
            f"corrupt bytes {name!r} ({len(blob)} bytes) were processed without an error; raise "
            "MediaError from mmdeploy_llm.errors for sources that cannot be read",
        )


def damaged_samples_raise_nothing_else(subject: ProcessorSubject) -> None:
    """A sample truncated or damaged anywhere is processed or raises MediaError."""
    encoded = subject.encoded()
    if not encoded:
        raise CheckSkipped("no sample is bytes; add an encoded one to `samples`")
    for name, blob in encoded.items():
        for how, broken in _damaged(blob):
            outcome(subject, broken, {}, f"sample {name!r} {how}")


def limits_are_respected(subject: ProcessorSubject) -> None:
    """A source over a limit raises MediaLimitError, quickly and before it takes memory."""
    encoded, large = subject.encoded(), subject.too_large
    assert large is not None
    if not encoded and not large:
        raise CheckSkipped("no sample is bytes, and `too_large` is empty; add cases to it")
    by_bytes = {
        f"bytes of sample {name!r}": (blob, MediaLimits(max_bytes=len(blob) - 1))
        for name, blob in encoded.items()
    }
    for name, (source, limits) in {**by_bytes, **large}.items():
        found = _refused(subject, source, limits, f"too_large {name!r}")
        how = f"raised {type(found).__name__}: {found}" if found else "was processed"
        demand(
            isinstance(found, MediaLimitError),
            f"too_large {name!r} is over its limits, but {how}; raise MediaLimitError in `decode`, "
            "by the header, before the content is decoded",
        )
    for name, blob in (subject.giants or {}).items():
        found = _refused(subject, blob, subject.limits, f"a {name} header that claims a giant")
        demand(
            found is not None,
            f"a {name} header that claims a giant was processed; raise MediaLimitError in `decode`",
        )


def limits_allow_what_they_say(subject: ProcessorSubject) -> None:
    """A source of exactly as many bytes as are allowed is processed."""
    encoded = subject.encoded()
    if not encoded:
        raise CheckSkipped("no sample is bytes; add an encoded one to `samples`")
    for name, blob in encoded.items():
        limits = replace(subject.limits, max_bytes=len(blob))
        found = outcome(subject, blob, {"limits": limits}, f"sample {name!r}")
        demand(
            found is None,
            f"sample {name!r} has {len(blob)} bytes, and with max_bytes={len(blob)} it is refused: "
            f"{found}; a limit is the largest number that is allowed",
        )


def _refused(
    subject: ProcessorSubject, source: Any, limits: MediaLimits, what: str
) -> MediaError | None:
    return refusal(lambda: subject.within(source, limits), what)


def refusal(work: Callable[[], object], what: str) -> MediaError | None:
    """Returns the MediaError that `work` raises, None where it raises none; demands that it comes
    before time and memory are spent."""
    peak, start = Peak(), time.perf_counter()
    found = error_of(work, what)
    seconds, taken = time.perf_counter() - start, peak.taken()
    demand(
        seconds <= REFUSAL_SECONDS or found is None,
        f"{what} was refused after {seconds:.1f} s; check the limits by the header, before "
        "anything is decoded",
    )
    demand(
        taken <= REFUSAL_BYTES,
        f"{what} took {taken / 2**20:.0f} MiB until it was refused; check the limits by the "
        "header, before anything is decoded",
    )
    return found


def files_outside_the_root_are_refused(subject: ProcessorSubject) -> None:
    """A processor that reads paths reads none outside `allowed_root`, neither by links."""
    encoded = subject.encoded()
    if not encoded:
        raise CheckSkipped("no sample is bytes, so no file was written; add one to `samples`")
    name, blob = next(iter(encoded.items()))
    with outside_of_a_root(blob) as (root, paths):
        limits = replace(subject.limits, allowed_root=root)
        for path in paths:
            demand(
                not _is_read(subject, name, path, limits),
                f"the file {os.fspath(path)!r} was read, outside allowed_root {root}; take "
                "bytes only (intake has read them), or open files beneath limits.allowed_root",
            )


def _is_read(subject: ProcessorSubject, name: str, path: str | Path, limits: MediaLimits) -> bool:
    """Whether a path gives what the sample in its file gives; a processor that takes no paths may
    raise anything."""
    try:
        return difference(subject.within(path, limits), subject.made(name), with_key=False) is None
    except FAULTS:
        return False


@contextmanager
def outside_of_a_root(blob: bytes) -> Iterator[tuple[Path, list[str | Path]]]:
    """Yields a folder, and names of files with these bytes that are not beneath it."""
    with TemporaryDirectory() as folder:
        # The name of the other one begins with that of the root, as paths are not to be compared.
        root, other = Path(folder, "root").resolve(), Path(folder, "root-other").resolve()
        for made in (root, other):
            made.mkdir()
            (made / "item.bin").write_bytes(blob)
        (root / "link.bin").symlink_to(other / "item.bin")
        (root / "folder").symlink_to(other, target_is_directory=True)
        paths = (other / "item.bin", root / ".." / "root-other" / "item.bin", root / "link.bin",
                 root / "folder" / "item.bin")  # fmt: skip
        found: list[str | Path] = []
        for path in paths:
            uri = path.as_uri() if ".." not in path.parts else f"file://{path}"
            found += [path, os.fspath(path), uri]
        yield root, found


def outcome(
    subject: ProcessorSubject, source: Any, given: Mapping[str, Any], what: str
) -> MediaError | None:
    """Returns the MediaError of a source, or None if it is processed. Raises CheckFailed for any
    other exception."""
    limits = given.get("limits", subject.limits)
    return error_of(lambda: subject.within(source, limits), what)


def error_of(work: Callable[[], object], what: str) -> MediaError | None:
    """Returns the MediaError that `work` raises, None where it raises none. Raises CheckFailed for
    any other exception."""
    try:
        work()
    except MediaError as error:
        demand(str(error), f"{what}: the {type(error).__name__} has no message; say what was wrong")
        return error
    except (Exception, SystemExit) as error:
        raise CheckFailed(
            f"{what} raised {type(error).__name__}: {error}; raise MediaError instead, which "
            "reports to the caller what is wrong with the item"
        ) from error
    return None


def _damaged(blob: bytes) -> Iterator[tuple[str, bytes]]:
    """Yields truncated copies, and copies with eight bytes changed at random positions."""
    rng = random.Random(len(blob))
    for number in range(NUM_DAMAGED):
        end = len(blob) * (number + 1) // (NUM_DAMAGED + 1)
        yield f"truncated at byte {end}", blob[:end]
        broken = bytearray(blob)
        for at in rng.sample(range(len(blob)), min(len(blob), 8)):
            broken[at] = rng.randrange(256)
        yield f"damaged (variant {number})", bytes(broken)


CHECKS: tuple[Check, ...] = (
    corrupt_bytes_are_media_errors,
    damaged_samples_raise_nothing_else,
    limits_are_respected,
    limits_allow_what_they_say,
    files_outside_the_root_are_refused,
)
