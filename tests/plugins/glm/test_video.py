"""GLM-4V's and GLM-4.6V's videos: frames, sizes and times as transformers chooses them."""

import itertools
import math
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmdeploy_llm_plugins.glm.frames import glm46v_frames, glm_frames
from mmdeploy_llm_plugins.glm.video import GlmVideoProcessor
from mmdeploy_llm_processors.image.options import ImageOptions
from mmdeploy_llm_processors.image.patches import fit_frames
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm46v.processing_glm46v import Glm46VProcessor

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import Checkpoint, MediaLimits
from mmdeploy_llm.media.video.timeline import UNKNOWN_RATE, constant_timeline
from mmdeploy_llm.testing.media.samples import clips

LIMITS = MediaLimits()
PROCESSORS = {"Glm4v": Glm4vProcessor, "Glm46V": Glm46VProcessor}


@pytest.fixture
def make():
    def processor(name="Glm4v", file=None, **options):
        vision = SimpleNamespace(patch_size=14, spatial_merge_size=2)
        checkpoint = Checkpoint(
            folder=Path("."),
            config=SimpleNamespace(vision_config=vision),
            video_preprocessor={"video_processor_type": f"{name}VideoProcessor", **(file or {})},
        )
        return GlmVideoProcessor(checkpoint, options)

    return processor


def clip(num, height=64, width=96):
    return np.random.default_rng(num).integers(0, 256, (num, height, width, 3), dtype=np.uint8)


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("name", "choose"), [("Glm4v", glm_frames), ("Glm46V", glm46v_frames)], ids=PROCESSORS
)
def test_frames_as_transformers(name, choose, make, rules_of):
    sample = rules_of(name.lower(), "sample_frames").sample_frames
    host, options = SimpleNamespace(fps=2, max_duration=300, temporal_patch_size=2), make(name)
    nums, rates = (1, 2, 3, 5, 30, 31, 100, 899, 1000, 20001), (0.4, 1.0, 10.0, 24.0, 29.97)
    for num, rate in itertools.product(nums, rates):
        duration = num / rate
        if math.floor(duration * 6) == 0:
            continue  # transformers returns no frame, or fails
        metadata = SimpleNamespace(total_num_frames=num, fps=rate, duration=duration)
        want = sample(host, metadata).tolist()
        found = choose(constant_timeline(64, 48, num, rate), options.options)
        found += found[-1:] * (len(found) % 2)  # as VideoPlan.num_frames counts
        assert found == want, (num, rate)


@pytest.mark.parametrize("name", PROCESSORS)
def test_options_of_a_video(name, make):
    processor = make(name)
    item = processor.decode(clip(40), LIMITS)

    def num_steps(**options):
        return processor.process(item, {"source_fps": 10.0, **options}).grid_thw[0]

    assert num_steps(fps=5.0) == 10
    assert num_steps(target_frames=6) == 3
    assert num_steps(fps=5.0, max_frames=8) == 4
    assert num_steps(fps=0.5, min_frames=8) == 4
    assert num_steps(min_frames=1) == {"Glm4v": 4, "Glm46V": 12}[name]
    with pytest.raises(MediaError, match="target_frames = 41, but the video has 40 frames"):
        num_steps(target_frames=41)


def test_sizes_as_transformers(make, rules_of):
    rng, rules = random.Random(0), rules_of("glm4v", "smart_resize")
    for _ in range(2000):
        height, width = (int(2 ** rng.uniform(0, 12)) for _ in range(2))
        low, num_frames = int(2 ** rng.uniform(0, 18)), 2 * rng.randint(1, 400)
        high = low * rng.randint(1, 1000)
        options = ImageOptions(min_pixels=low, max_pixels=high)
        try:
            want = rules.smart_resize(num_frames, height, width, 2, 28, low, high)
        except ValueError:
            with pytest.raises(MediaError, match="200 times"):
                fit_frames(height, width, num_frames, options)
            continue
        assert fit_frames(height, width, num_frames, options) == want
    processor = make()
    assert processor.target_size(300, 200, 3) == processor.target_size(300, 200, 4)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize(("num", "rate"), [(1, 24), (5, 1.5), (6, 29.97), (7, 0.6)])
def test_prompts_as_transformers(name, num, rate, make):
    processor = make(name)
    item, options = processor.decode(clip(num), LIMITS), {"source_fps": rate}
    made = processor.process(item, options)
    indices = [*range(num), *[num - 1] * (num % 2)]
    times = [index / rate for index in indices]
    theirs = PROCESSORS[name]
    host = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2),
        image_token="<|image|>",
        replace_frame_token_id=lambda *args, **named: theirs.replace_frame_token_id(
            SimpleNamespace(image_token="<|image|>"), *args, **named
        ),
    )
    videos = {
        "video_grid_thw": torch.tensor([made.grid_thw]),
        "video_metadata": [SimpleNamespace(fps=rate, timestamps=times)],
    }
    want = theirs.replace_video_token(host, videos, 0)
    assert made.prompt_text.replace("<|video|>", "<|image|>") == want
    assert made.prompt_text.count("<|video|>") == made.num_tokens
    assert processor.prompt_text(item, options) == made.prompt_text
    assert processor.count_tokens(item, options) == made.num_tokens


def test_a_file_with_numbers_that_transformers_does_not_read(make):
    """It writes num_frames = 16 into every file."""
    processor = make(file={"num_frames": 16, "fps": 4, "max_duration": 100})
    assert (processor.options.target_frames, processor.options.max_frames) == (-1, 400)


@pytest.mark.parametrize("choose", [glm_frames, glm46v_frames])
def test_it_looks_at_either_half_of_the_twins_of_the_kit(choose):
    for name, (one, two) in clips.twins().items():
        if isinstance(one, np.ndarray):
            _, height, width, _ = one.shape
            timeline = constant_timeline(width, height, len(one), UNKNOWN_RATE)
            chosen = choose(timeline, GlmVideoProcessor.default)
            assert (one[chosen] != two[chosen]).any(), name
