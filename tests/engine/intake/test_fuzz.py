"""Mutated media files: each becomes model inputs or that item's error, in bounded time, whatever
it contains. The slow run tries 10,000 files, the usual one 600."""

import io
import random
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pillow_heif
import pytest
from mmdeploy_llm_plugins.ernie.image import ErnieImageProcessor
from mmdeploy_llm_plugins.ernie.video import ErnieVideoProcessor
from PIL import Image

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import Checkpoint, MediaLimits
from mmdeploy_llm.media.image.decode import FORMATS
from mmdeploy_llm.media.loading.kinds import ModelMedia
from mmdeploy_llm.media.loading.loader import MediaLoader
from mmdeploy_llm.messages import MediaItem

MAX_SECONDS = 60.0  # after which an item hangs
LIMITS = MediaLimits(max_pixels=2_000_000, max_duration=60.0, decode_timeout=60.0)
MOVING = (("mp4", "libx264"), ("matroska", "libx264"), ("avi", "mpeg4"), ("mpegts", "libx264"))


@pytest.fixture(scope="module")
def originals(load_file):
    """Small files of all formats, as [(kind, bytes)]."""
    files = load_file("media/video_files.py")
    values = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    picture = Image.fromarray(values)
    found = []
    for name in FORMATS:
        buffer = io.BytesIO()
        if name == "HEIF":  # which Pillow writes for nobody but its plugin
            pillow_heif.from_pillow(picture).save(buffer)
        else:
            picture.save(buffer, name)
        found.append(("image", buffer.getvalue()))
    found += [("video", files.animation(name, 3)) for name in ("GIF", "WEBP")]
    for name, codec in MOVING:
        blob = files.video(6, 10, name=name, codec=codec, size=(48, 32))
        found.append(("video", blob))
    return found


@pytest.fixture(scope="module")
def loader():
    vision = SimpleNamespace(patch_size=14, spatial_merge_size=2)
    checkpoint = Checkpoint(folder=Path("."), config=SimpleNamespace(vision_config=vision))
    small = {"min_pixels": 56 * 56, "video_min_pixels": 56 * 56, "video_max_pixels": 112 * 112}
    processors = {
        "image": ErnieImageProcessor(checkpoint, small),
        "video": ErnieVideoProcessor(checkpoint, small),
    }
    found = MediaLoader(
        media=ModelMedia(processors=processors),
        fetch=lambda ref, limits: b"",
        limits=LIMITS,
        max_items={"image": 1, "video": 1},
        cache_bytes=1,
    )
    yield found
    found.close()


def mutations(drawn):
    """Returns one to four changes to a file, each as (operation, position as a share of its
    length, bytes). Half of them are near its start, where the headers are."""
    return [
        (
            drawn.choice(("overwrite", "insert", "cut", "repeat", "truncate")),
            drawn.uniform(0, drawn.choice((0.05, 1))),
            drawn.randbytes(drawn.randint(1, 12)),
        )
        for _ in range(drawn.choice((1, 1, 2, 4)))
    ]


def mutated(blob, mutations):
    blob = bytearray(blob)
    for what, share, data in mutations:
        place = int(share * len(blob))
        if what == "overwrite":
            blob[place : place + len(data)] = data
        elif what == "insert":
            blob[place:place] = data
        elif what == "cut":
            del blob[place : place + 16 * len(data)]
        elif what == "repeat":
            blob[place:place] = blob[place : place + 64 * len(data)]
        else:
            del blob[max(1, place) :]
    return bytes(blob)


def outcome(use, item):
    """Returns "good", "bad" for an error with a message without addresses, or that message."""
    try:
        [made] = use([item])
    except MediaError as error:
        return "bad" if str(error) and "0x" not in str(error) else f"not a message: {error}"
    assert made.num_tokens > 0
    return "good"


def fuzz(loader, originals, num_files):
    drawn = random.Random(20_261_121)  # the same files on every machine
    done = []
    for _ in range(num_files):
        kind, blob = drawn.choice(originals)
        source = mutated(blob, mutations(drawn))
        item = MediaItem(kind=kind, source=source, options={})
        begin = time.monotonic()
        done.append(outcome(loader.load, item))
        assert outcome(loader.count, item) in ("good", "bad")
        assert time.monotonic() - begin < MAX_SECONDS
    assert set(done) == {"good", "bad"}
    return done


@pytest.mark.full
def test_mutated_files(loader, originals):
    done = fuzz(loader, originals, 600)
    assert len(done) >= 600
    assert min(done.count("good"), done.count("bad")) > 50


@pytest.mark.long
def test_many_mutated_files(loader, originals):
    assert len(fuzz(loader, originals, 10_000)) >= 10_000


def test_the_originals_are_good(loader, originals):
    for kind, blob in originals:
        [made] = loader.load([MediaItem(kind=kind, source=blob, options={})])
        assert made.num_tokens > 0
