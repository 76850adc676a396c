"""Frames carry their time, written as FastDeploy and transformers write it."""

from pathlib import Path
from types import SimpleNamespace

import mmdeploy_llm_plugins.ernie
import numpy as np
import pytest
import torch
from mmdeploy_llm_plugins.ernie.video import ErnieVideoProcessor, Stamp, time_text
from PIL import Image, ImageDraw, ImageFont

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import Checkpoint, MediaLimits

LIMITS = MediaLimits()
FONT = Path(mmdeploy_llm_plugins.ernie.__file__).with_name("Roboto-Regular.ttf")


def make(folder=Path("."), **options):
    vision = SimpleNamespace(patch_size=14, spatial_merge_size=2)
    checkpoint = Checkpoint(folder=folder, config=SimpleNamespace(vision_config=vision))
    small = {"video_min_pixels": 56 * 56, "video_max_pixels": 28 * 28 * 16, "video_min_frames": 2}
    return ErnieVideoProcessor(checkpoint, {**small, **options})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "time: 00:00:00.00"),
        (2.5, "time: 00:00:02.50"),
        (61.129, "time: 00:01:01.13"),
        (3661.5, "time: 01:01:01.50"),
    ],
)
def test_text(seconds, text):
    assert time_text(seconds) == text


def test_pixels():
    """The stamp is as high as a tenth of the shorter side, black on white, at the top left."""
    frame = Image.new("RGB", (400, 300), (90, 120, 30))
    want = frame.copy()
    ImageDraw.Draw(want).text(
        (0, 0),
        "time: 00:00:02.50",
        font=ImageFont.truetype(FONT, 30),
        fill=(0, 0, 0),
        stroke_width=3,
        stroke_fill=(255, 255, 255),
    )
    got = Stamp(Path("."), "Roboto-Regular.ttf").draw(frame, 2.5)
    assert got.tobytes() == want.tobytes() != frame.tobytes()


def test_frames_carry_their_own_time():
    """Equal frames differ only by their stamps, and are equal without them."""
    still = [np.full((112, 112, 3), 90, np.uint8)] * 2
    for is_drawn in (True, False):
        processor = make(video_draw_on_frames=is_drawn)
        made = processor.process(processor.decode(still, LIMITS), {"source_fps": 2})
        first, second = made.tensors["pixels"].view(2, -1)
        assert torch.equal(first, second) == (not is_drawn)


def test_the_checkpoints_font_is_used(tmp_path):
    (tmp_path / "Roboto-Regular.ttf").write_bytes(b"no font")
    with pytest.raises(CheckpointError, match=r"font '.*Roboto-Regular\.ttf' cannot be read"):
        make(folder=tmp_path)


def test_tiny_frames_have_no_room():
    frame = Image.new("RGB", (400, 9))
    assert Stamp(Path("."), "Roboto-Regular.ttf").draw(frame, 1).tobytes() == frame.tobytes()
