"""Each broken splitter fails its check, whose message says what to do."""

import io
import zipfile
import zlib
from pathlib import Path

import pytest

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import Checkpoint, MediaProcessorSpec, MediaSplitter, SplitPart
from mmdeploy_llm.media_checks.splitters import CHECKS, SplitterSubject
from mmdeploy_llm.model_checks.base import CheckFailed, CheckSkipped


class Zips(MediaSplitter):
    kind = "zip"
    markers = ("<zip>",)
    faults = (zipfile.BadZipFile, ValueError, EOFError, OSError, RuntimeError, NotImplementedError)

    def __init__(self, checkpoint, options):
        pass

    def check(self, options):
        if options:
            raise MediaError("a zip has no options")

    def read(self, archive, name, limits):
        blob = archive.open(name).read(limits.max_bytes + 1)
        limits.check_bytes(len(blob), name)
        return blob

    def split(self, source, options, limits):
        self.check(options)
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


class NoLabels(Zips):
    def made(self, parts):
        return [SplitPart(source=part.source, label="") for part in parts]


class Plain:
    def __init__(self, checkpoint, options):
        pass


def archive():
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a.png", b"a" * 400)
        file.writestr("b.png", b"b" * 300)
    return held.getvalue()


def failures(splitter, **changed):
    spec = MediaProcessorSpec(
        name="zips", kind="zip", yields="image", factory=f"{__name__}:{splitter.__name__}"
    )
    checkpoint = Checkpoint(folder=Path(), config=None)
    given = {"samples": {"two": archive()}, **changed}
    subject = SplitterSubject(spec=spec, checkpoint=checkpoint, **given)
    found = {}
    for check in CHECKS:
        try:
            check(subject)
        except CheckFailed as failure:
            found[check.__name__] = str(failure)
    return found


def test_a_good_splitter_passes():
    assert failures(Zips) == {}


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
    ],
)
def test_a_broken_splitter_is_found(splitter, check, told):
    assert told in failures(splitter)[check]


def test_without_samples_it_says_what_to_add():
    spec = MediaProcessorSpec(name="zips", kind="zip", yields="image", factory=f"{__name__}:Zips")
    checkpoint = Checkpoint(folder=Path(), config=None)
    with pytest.raises(CheckSkipped, match="SplitterConformance"):
        CHECKS[1](SplitterSubject(spec=spec, checkpoint=checkpoint))
