"""Each broken splitter fails its check, whose message says what to do."""

import io
import re
import time
import zipfile
import zlib
from pathlib import Path

import pytest

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import Checkpoint, MediaProcessorSpec, MediaSplitter, SplitPart
from mmdeploy_llm.testing.media.splitter_subject import SplitterSubject
from mmdeploy_llm.testing.media.splitters import (
    CHECKS,
    bytes_of_parts_are_limited,
    damage_is_a_media_error,
)
from mmdeploy_llm.testing.models.base import CheckFailed, CheckSkipped


class Zips(MediaSplitter):
    kind = "zip"
    markers = ("<zip>",)
    faults = (zipfile.BadZipFile, ValueError, EOFError, OSError, RuntimeError, NotImplementedError)

    def __init__(self, checkpoint, options):
        pass

    def check(self, options):
        if options:
            raise MediaError("a zip has no options")

    def check_size(self, source, limits):
        limits.check_bytes(len(source), "the archive")

    def read(self, archive, name, limits):
        blob = archive.open(name).read(limits.max_bytes + 1)
        limits.check_bytes(len(blob), name)
        return blob

    def split(self, source, options, limits):
        self.check(options)
        self.check_size(source, limits)
        try:
            archive = zipfile.ZipFile(io.BytesIO(source))
            names = archive.namelist()
            parts = [
                SplitPart(source=self.read(archive, name, limits), label=name) for name in names
            ]
        except MediaError:
            raise
        except (*self.faults, zlib.error) as error:
            raise MediaError(f"no archive: {error}") from error
        return self.made(parts)

    def made(self, parts):
        return parts


class OtherKind(Zips):
    kind = "archive"


class NoMarkers(Zips):
    markers = ()


class IgnoresOptions(Zips):
    def check(self, options):
        pass


class Unlimited(Zips):
    def read(self, archive, name, limits):
        return archive.read(name)


class Raises(Zips):
    faults = ()


class Repeats(Zips):
    def made(self, parts):
        return type("Endless", (list,), {"__getitem__": lambda self, index: parts[0]})(parts)


class Shuffles(Zips):
    turn = 0

    def made(self, parts):
        self.turn += 1
        return parts[:: 1 if self.turn % 2 else -1]


class SizeIgnored(Zips):
    def check_size(self, source, limits):
        pass


class SizeOffByOne(Zips):
    def check_size(self, source, limits):
        limits.check_bytes(len(source) + 1, "the archive")


class NothingFromTheEnd(Zips):
    def made(self, parts):
        def item(self, index):
            if not 0 <= index < len(parts):
                raise IndexError(index)
            return parts[index]

        return type("Forward", (list,), {"__getitem__": item})(parts)


class LastIsFirst(Zips):
    def made(self, parts):
        def item(self, index):
            return parts[0 if index == -1 else index]

        return type("Folded", (list,), {"__getitem__": item})(parts)


class EndsAgain(Zips):
    """Goes round below the first part."""

    def made(self, parts):
        def item(self, index):
            return parts[index if index >= 0 else index % len(parts)]

        return type("Round", (list,), {"__getitem__": item})(parts)


class DocumentInSelf(Zips):
    def split(self, source, options, limits):
        self.document = source
        time.sleep(1e-3)
        return super().split(self.document, options, limits)


class SharedPlace(Zips):
    """Moves a place in the archive, which all who read the sequence share."""

    def made(self, parts):
        place = [0]

        def item(self, index):
            part = parts[index]
            place[0] = index % len(parts)
            time.sleep(1e-4)
            return parts[place[0]] if isinstance(part, SplitPart) else part

        return type("Seeking", (list,), {"__getitem__": item})(parts)


class NoLabels(Zips):
    def made(self, parts):
        return [SplitPart(source=part.source, label="") for part in parts]


class Plain:
    def __init__(self, checkpoint, options):
        pass


def archive(*sizes):
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as file:
        for letter, size in zip("abc", sizes, strict=False):
            file.writestr(f"{letter}.png", letter.encode() * size)
    return held.getvalue()


# Of parts that are larger than the archive, and of smaller ones.
SAMPLES = {"large": archive(400, 300), "small": archive(60, 50, 40)}


def failures(splitter, **changed):
    spec = MediaProcessorSpec(
        name="zips", kind="zip", yields="image", factory=f"{__name__}:{splitter.__name__}"
    )
    checkpoint = Checkpoint(folder=Path(), config=None)
    given = {"samples": SAMPLES, **changed}
    subject = SplitterSubject(spec=spec, checkpoint=checkpoint, **given)
    found = {}
    for check in CHECKS:
        try:
            check(subject)
        except CheckFailed as failure:
            found[check.__name__] = str(failure)
        except CheckSkipped:
            pass
    return found


def test_a_good_splitter_passes():
    assert failures(Zips) == {}


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("splitter", "check", "told"),
    [
        (OtherKind, "builds_a_splitter", "the spec's is 'zip'"),
        (NoMarkers, "builds_a_splitter", "give a tuple of texts"),
        (Plain, "builds_a_splitter", "derive it from mmdeploy_llm.hooks.MediaSplitter"),
        (IgnoresOptions, "unknown_options_are_refused", "is ignored"),
        (Unlimited, "bytes_of_parts_are_limited", "limits.check_bytes"),
        (Raises, "damage_is_a_media_error", "raise MediaError"),
        (Repeats, "parts_are_a_sequence", "raise IndexError"),
        (Shuffles, "splits_the_same_twice", "keep one order"),
        (NoLabels, "parts_are_a_sequence", "label='page 1'"),
        (EndsAgain, "parts_are_a_sequence", r"[-len - 1]"),
        (NothingFromTheEnd, "negative_indices_count_from_the_end", "count from the end"),
        (LastIsFirst, "negative_indices_count_from_the_end", "count from the end"),
        (DocumentInSelf, "threads_get_the_same_parts", "in local variables"),
        (SharedPlace, "threads_get_the_same_parts", "in a shared split"),
        (SizeIgnored, "bytes_of_the_document_are_limited", "is split; call limits.check_bytes"),
        (SizeOffByOne, "bytes_of_the_document_are_limited", "allow exactly max_bytes"),
    ],
)
def test_a_broken_splitter_is_found(splitter, check, told):
    assert told in failures(splitter)[check]


def test_parts_that_unpack_to_no_more_say_what_to_add():
    spec = MediaProcessorSpec(name="zips", kind="zip", yields="image", factory=f"{__name__}:Zips")
    checkpoint = Checkpoint(folder=Path(), config=None)
    subject = SplitterSubject(spec=spec, checkpoint=checkpoint, samples={"small": SAMPLES["small"]})
    with pytest.raises(CheckSkipped, match="add one that unpacks to more"):
        bytes_of_parts_are_limited(subject)


def test_without_samples_it_says_what_to_add():
    spec = MediaProcessorSpec(name="zips", kind="zip", yields="image", factory=f"{__name__}:Zips")
    checkpoint = Checkpoint(folder=Path(), config=None)
    with pytest.raises(CheckSkipped, match="SplitterConformance"):
        CHECKS[1](SplitterSubject(spec=spec, checkpoint=checkpoint))


class Damaged(Raises):
    """Reads the kit's own documents, and lets the errors of its library through."""

    kind = "pdf"

    def split(self, source, options, limits):
        self.check(options)
        self.check_size(source, limits)
        pages = [int(number) for number in re.findall(rb"(\d+) 0 R /Resources", source)]
        if not source.startswith(b"%PDF"):
            raise MediaError("no pdf")
        if not pages or b"%%EOF" not in source:
            raise ValueError("no pages")
        return [SplitPart(source=source[:9], label=f"page {page}") for page in pages]


def test_generated_samples_are_damaged_too():
    spec = MediaProcessorSpec(
        name="pdfs", kind="pdf", yields="image", factory=f"{__name__}:Damaged"
    )
    checkpoint = Checkpoint(folder=Path(), config=None)
    with pytest.raises(CheckFailed, match=r"cut at byte \d+ raised ValueError"):
        damage_is_a_media_error(SplitterSubject(spec=spec, checkpoint=checkpoint))
