"""Bugs planted in plugins for media as strangers write them: each is found by the check that the
table names, and the plugins without a bug pass all checks."""

from types import SimpleNamespace

import numpy as np
import pytest

from mmdeploy_llm.hooks import Checkpoint, MediaProcessorSpec, MediaSplitter
from mmdeploy_llm.testing.media import processors, splitters
from mmdeploy_llm.testing.media.samples import image_bytes, pixels
from mmdeploy_llm.testing.media.splitter_subject import SplitterSubject
from mmdeploy_llm.testing.media.subject import ProcessorSubject

from . import planted_documents as planted

BUGS = {  # the class with the bug -> the check
    "ScansOfAnySize": "pixels_are_limited",
    "ScansOfAFrameOfItsOwn": "pixels_are_limited",
    "UnlockedScans": "threads_do_not_disturb_each_other",
    "LineLockedScans": "threads_do_not_disturb_each_other",
    "WholeGammas": "keys_change_with_the_options",
    "InvertForgotten": "keys_change_with_the_options",
    "GammaForgotten": "keys_change_with_the_options",
    "CollagesWithFiles": "linked_files_are_not_read",
    "CollagesBesideTheRoot": "linked_files_are_not_read",
    "VectorsWithFiles": "files_named_by_a_document_are_not_read",
    "VectorsWithURLs": "files_named_by_a_document_are_not_read",
    "VectorsWithEntities": "files_named_by_a_document_are_not_read",
    "NoPageInTheDigest": "options_change_the_parts",
    "OptionsOfTheEngineForgotten": "options_change_the_parts",
    "GreyForgotten": "options_change_the_parts",
    "HeadInTheDigest": "options_change_the_parts",
    "GreyIgnored": "options_change_the_parts",
    "FramesOfAnySize": "pixels_are_limited",
    "FramesUpToTheLimit": "pixels_are_limited",
    "WideFrames": "pixels_are_limited",
    "FramesDecodedFirst": "pixels_are_limited",
    "UnlockedFrames": "threads_get_the_same_parts",
    "FreeLockedFrames": "threads_get_the_same_parts",
    "UnlockedTapes": "threads_get_the_same_parts",
    "OneLineTapes": "threads_get_the_same_parts",
    "UnpackedTapes": "files_named_by_a_document_are_not_read",
    "LinkedTapes": "files_named_by_a_document_are_not_read",
    "AlbumsOfAnything": "files_named_by_a_document_are_not_read",
    "AlbumsByName": "files_named_by_a_document_are_not_read",
    "AlbumsWithLinks": "files_named_by_a_document_are_not_read",
    "TakenAsItIs": "sounds_are_resampled",
    "EverySecondSample": "sounds_are_resampled",
    "Interpolated": "sounds_are_resampled",
    "OnlyLowRates": "sounds_are_resampled",
    "ResampledInBlocks": "features_have_no_joints",
    "Chunks": "features_have_no_joints",
    "LongChunks": "features_have_no_joints",
    "NormalisedInChunks": "features_have_no_joints",
    "SecondsForgotten": "keys_change_with_every_byte",
}
MISSED: dict[str, str] = {}  # why the kit does not find a bug
GOOD = ("Scans", "Collages", "Vectors", "Frames", "Tapes", "Albums", "Sounds")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with what the plugins read: tables of scans, and an album."""
    folder = tmp_path_factory.mktemp("strangers")
    rng, every = np.random.default_rng(3), np.arange(256, dtype=np.uint8)
    tables = np.stack([rng.permutation(every) for _ in every])
    (folder / "tables").write_bytes(tables.tobytes())
    album = folder / "holidays"
    album.mkdir()
    for number in (1, 2, 3):
        blob = image_bytes(pixels(20, 30, seed=number), "PNG")
        (album / f"{number}.png").write_bytes(blob)
    (album / "list.txt").write_text("1.png 2.png 3.png")
    return folder


def fields_of(name, folder):
    """Returns what the author of a plugin gives to the kit."""
    if name == "Scans":
        samples = {"tall": planted.scan(60, 30, 1), "wide": planted.scan(24, 60, 2)}
        gammas = ({"gamma": 2.0}, {"gamma": 2.4})
        return {"samples": samples, "item_options": gammas, "other_options": {"invert": True}}
    if name == "Collages":
        return {"samples": {"one": b"COLLAGE red picture.png", "two": b"COLLAGE blue lime"}}
    if name == "Vectors":
        samples = {"one": planted.svg("red"), "two": planted.svg("red", "blue")}
        twins = {"other colours": (planted.svg("green", "navy"), planted.svg("green", "lime"))}
        grey = {"grey": True}
        return {"samples": samples, "twins": twins, "item_options": grey, "other_options": grey}
    if name == "Frames":
        samples = {"three": planted.gif(40, 30, 1, 2, 3), "two": planted.gif(20, 50, 4, 5)}
        return {"samples": samples, "item_options": {"turn": 90}}
    if name == "Tapes":
        return {"samples": {"four": planted.tape(900, 700, 800, 600), "one": planted.tape(50)}}
    if name == "Albums":
        return {"samples": {"holidays": folder / "holidays"}}
    return {}


def good_of(cls):
    return next(name for name in GOOD if issubclass(cls, getattr(planted, name)))


@pytest.fixture
def subject_of(folder):
    """Returns the subject of a plugin, and all checks of its sort."""
    built = []

    def make(name):
        cls = getattr(planted, name)
        is_splitter = issubclass(cls, MediaSplitter)
        spec = MediaProcessorSpec(
            name="stranger",
            kind=cls.kind,
            yields="image" if is_splitter else None,
            factory=f"{planted.__name__}:{name}",
        )
        preprocessor = {"sampling_rate": 16_000} if cls.kind == "audio" else {}
        checkpoint = Checkpoint(folder=folder, config=SimpleNamespace(), preprocessor=preprocessor)
        kind = SplitterSubject if is_splitter else ProcessorSubject
        built.append(kind(spec=spec, checkpoint=checkpoint, **fields_of(good_of(cls), folder)))
        return built[-1], (splitters if is_splitter else processors).CHECKS

    yield make
    for subject in built:
        subject.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of sax, with a bug
@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(subject_of, failures, name):
    subject, checks = subject_of(name)
    found = failures([one for one in checks if one.__name__ == BUGS[name]], subject)
    assert bool(found) == (name not in MISSED), f"{name} passes {BUGS[name]}"
    print(f"{name}: {found}")


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", GOOD)
def test_a_plugin_without_a_bug_passes(subject_of, failures, name):
    subject, checks = subject_of(name)
    assert failures(checks, subject) == {}


def test_the_share_of_planted_bugs():
    assert set(MISSED) <= set(BUGS)
    assert len(MISSED) <= len(BUGS) / 10
