"""InternVL's videos: frames and texts as transformers chooses them."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmdeploy_llm_plugins.internvl.image import InternVLImageProcessor
from mmdeploy_llm_plugins.internvl.video import InternVLVideoProcessor, middle_frames
from mmdeploy_llm_processors.video.options import item_options
from transformers.models.internvl.processing_internvl import InternVLProcessor

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import Checkpoint, MediaLimits
from mmdeploy_llm.media.video.timeline import constant_timeline

LIMITS = MediaLimits()
VISION = SimpleNamespace(image_size=[56, 56], patch_size=[14, 14])
CONFIG = SimpleNamespace(vision_config=VISION, downsample_ratio=0.5)


@pytest.fixture
def processor():
    return InternVLVideoProcessor(Checkpoint(folder=Path("."), config=CONFIG), {})


def clip(num, height=60, width=90):
    return np.random.default_rng(num).integers(0, 256, (num, height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize("options", [{"target_frames": 8}, {"fps": 2.0, "max_frames": 999}])
def test_frames_as_transformers(options, rules_of):
    sample = rules_of("internvl", "sample_frames").sample_frames
    host = SimpleNamespace(num_frames=None, initial_shift=True)
    resolved = item_options(InternVLVideoProcessor.default, options)
    given = {"num_frames": 8} if "fps" not in options else {"fps": 2.0}
    for num, rate in itertools.product((8, 9, 30, 31, 77, 500), (4.0, 24.0, 29.97)):
        metadata = SimpleNamespace(total_num_frames=num, fps=rate)
        if "fps" in given and int(num / rate * 2) < 1:
            continue  # transformers divides by zero
        want = sample(host, metadata, **given).tolist()
        assert middle_frames(constant_timeline(64, 48, num, rate), resolved) == want


def test_pixels_and_texts(processor):
    """A frame is one tile, as an image that is not split."""
    frames = clip(3)
    item = processor.decode(frames, LIMITS)
    made = processor.process(item, {})
    images = InternVLImageProcessor(
        Checkpoint(folder=Path("."), config=CONFIG), {"crop_to_patches": False}
    )
    tiles = [images.process(images.decode(frame, LIMITS), {}) for frame in frames]
    assert torch.equal(made.tensors["pixels"], torch.cat([t.tensors["pixels"] for t in tiles]))
    assert made.grid_thw == (3, 4, 4)
    host = SimpleNamespace(
        start_image_token="<img>",
        end_image_token="</img>",
        image_token="<video>",
        image_seq_length=4,
    )
    videos = {"pixel_values_videos": [torch.empty(3, 1)]}
    assert made.prompt_text == InternVLProcessor.replace_video_token(host, videos, 0)
    assert made.prompt_text == processor.prompt_text(item, {})
    assert made.num_tokens == processor.count_tokens(item, {}) == 12


def test_frames_have_one_size():
    with pytest.raises(ConfigError, match="video_max_pixels, but the frames of this model have"):
        InternVLVideoProcessor(
            Checkpoint(folder=Path("."), config=CONFIG), {"video_max_pixels": 100}
        )
