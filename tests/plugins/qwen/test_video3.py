"""Qwen3-VL's videos: frames, sizes and time stamps as transformers chooses them."""

import itertools
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmdeploy_llm_plugins.qwen.video import QwenVideoProcessor
from mmdeploy_llm_plugins.qwen.video3 import Qwen3VideoProcessor, fit_video
from mmdeploy_llm_processors.image.options import ImageOptions
from mmdeploy_llm_processors.video.options import item_options
from mmdeploy_llm_processors.video.select import first_to_last
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from mmdeploy_llm.errors import CheckpointError, MediaError
from mmdeploy_llm.hooks import Checkpoint, MediaLimits
from mmdeploy_llm.media.video.timeline import constant_timeline

LIMITS = MediaLimits()
OPTIONS = Qwen3VideoProcessor.default


@pytest.fixture(scope="module")
def rules(rules_of):
    return rules_of("qwen3_vl", "sample_frames", "smart_resize")


@pytest.fixture
def make():
    def processor(file=None, **options):
        vision = SimpleNamespace(patch_size=16, spatial_merge_size=2)
        checkpoint = Checkpoint(
            folder=Path("."),
            config=SimpleNamespace(vision_config=vision),
            video_preprocessor=file or {},
        )
        return Qwen3VideoProcessor(checkpoint, options)

    return processor


def clip(num, height=64, width=96):
    return np.random.default_rng(num).integers(0, 256, (num, height, width, 3), dtype=np.uint8)


class TestFrames:
    @pytest.mark.parametrize("options", [{}, {"fps": 5.0, "max_frames": 20}])
    def test_as_transformers(self, rules, options):
        resolved = item_options(OPTIONS, options)
        host = SimpleNamespace(
            fps=2, min_frames=resolved.min_frames, max_frames=resolved.max_frames
        )
        nums, rates = (1, 2, 3, 5, 30, 31, 100, 1000, 20001), (1.0, 10.0, 24.0, 29.97)
        for num, rate in itertools.product(nums, rates):
            metadata = SimpleNamespace(total_num_frames=num, fps=rate)
            want = rules.sample_frames(host, metadata, fps=resolved.fps).tolist()
            assert first_to_last(constant_timeline(64, 48, num, rate), resolved) == want, (
                num,
                rate,
            )

    def test_target_frames(self, rules):
        metadata = SimpleNamespace(total_num_frames=77, fps=10)
        want = rules.sample_frames(SimpleNamespace(fps=None), metadata, num_frames=9).tolist()
        options = item_options(OPTIONS, {"target_frames": 9})
        assert first_to_last(constant_timeline(64, 48, 77, 10), options) == want

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"target_frames": 40}, "target_frames = 40, but the video has 10 frames"),
            ({"fps": -1}, "Must provide either positive fps or positive target_frames"),
        ],
    )
    def test_impossible_numbers(self, options, message):
        with pytest.raises(MediaError, match=message):
            first_to_last(constant_timeline(64, 48, 10, 10), item_options(OPTIONS, options))


class TestSizes:
    def test_as_transformers(self, rules):
        rng = random.Random(0)
        for _ in range(3000):
            height, width = (int(2 ** rng.uniform(0, 12)) for _ in range(2))
            low, num_frames = int(2 ** rng.uniform(0, 18)), rng.randint(2, 800)
            high = low * rng.randint(1, 1000)
            options = ImageOptions(min_pixels=low, max_pixels=high, patch_size=16)
            arguments = (num_frames, height, width, 2, 32, low, high)
            try:
                want = rules.smart_resize(*arguments)
            except ValueError:
                with pytest.raises(MediaError, match="200 times"):
                    fit_video(height, width, num_frames, options)
                continue
            assert fit_video(height, width, num_frames, options) == want

    def test_more_frames_are_smaller(self, make):
        processor = make(video_max_pixels=32 * 32 * 64, video_min_pixels=32 * 32)
        few, many = (
            processor.process(processor.decode(clip(num, 320, 320), LIMITS), {}) for num in (2, 8)
        )
        assert few.grid_thw == (1, 10, 10)  # 5 x 5 tokens: two steps have 50 of the allowed 64
        assert many.grid_thw == (4, 4, 4)

    def test_a_checkpoint_that_caps_the_frames(self):
        options = ImageOptions(min_pixels=32 * 32, max_pixels=32 * 32 * 768, patch_size=16)
        assert fit_video(1280, 1280, 2, options) == (608, 608)
        assert fit_video(1280, 1280, 2, options, 16) == (128, 128)
        # where many frames share the bound, the bound decides
        assert fit_video(1280, 1280, 200, options, 16) == fit_video(1280, 1280, 200, options)

    def test_the_cap_is_read_from_the_file(self, make):
        file = {"cap_pixels_per_frame": True, "max_video_tokens": 4}
        size = {"video_min_pixels": 32 * 32}
        free, capped = make(**size), make(file, **size)
        item = free.decode(clip(2, 320, 320), LIMITS)
        assert free.count_tokens(item, {}) == 100
        assert capped.count_tokens(item, {}) == 4


class TestPrompt:
    @pytest.mark.one_is_quick
    @pytest.mark.parametrize("num", [1, 2, 5, 6])
    @pytest.mark.parametrize("rate", [1.5, 24, 29.97])
    def test_as_transformers(self, make, num, rate):
        processor = make()
        item, options = processor.decode(clip(num), LIMITS), {"source_fps": rate}
        made = processor.process(item, options)
        host = SimpleNamespace(
            video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
            video_token="<|video_pad|>",
            vision_start_token="<|vision_start|>",
            vision_end_token="<|vision_end|>",
            _calculate_timestamps=lambda *args: Qwen3VLProcessor._calculate_timestamps(None, *args),
        )
        videos = {
            "video_grid_thw": torch.tensor([made.grid_thw]),
            "video_metadata": [SimpleNamespace(fps=rate, frames_indices=list(range(num)))],
        }
        assert made.prompt_text == Qwen3VLProcessor.replace_video_token(host, videos, 0)
        assert made.prompt_text.count("<|video_pad|>") == made.num_tokens
        assert processor.prompt_text(item, options) == made.prompt_text
        assert processor.count_tokens(item, options) == made.num_tokens

    def test_times_are_part_of_the_key(self, make):
        processor = make()
        item = processor.decode(clip(4), LIMITS)
        keys = {processor.process(item, {"source_fps": rate}).key for rate in (1, 2)}
        assert len(keys) == 2


class TestPixels:
    def test_normalisation(self, make):
        """Mean and deviation are 0.5 unless the file says otherwise."""
        white = np.full((2, 64, 64, 3), 255, np.uint8)
        for file, want in (({}, 1.0), ({"image_mean": [0.0] * 3, "image_std": [0.25] * 3}, 4.0)):
            processor = make(file)
            pixels = processor.process(processor.decode(white, LIMITS), {}).tensors["pixels"]
            assert pixels.unique().tolist() == [want]

    def test_the_same_as_qwen2_but_for_size_and_normalisation(self, make):
        """Two frames per patch, ordered in blocks of merged patches."""
        options = {"video_min_pixels": 64 * 96 * 4, "video_max_pixels": 64 * 96 * 4}
        clip_norm = {
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
        }
        ours, frames = make(clip_norm, **options), clip(4)
        vision = SimpleNamespace(patch_size=16, spatial_merge_size=2)
        checkpoint = Checkpoint(folder=Path("."), config=SimpleNamespace(vision_config=vision))
        sizes = {"video_min_pixels": 64 * 96, "video_max_pixels": 64 * 96}
        theirs = QwenVideoProcessor(checkpoint, sizes)
        made = [
            processor.process(processor.decode(frames, LIMITS), {}) for processor in (ours, theirs)
        ]
        assert made[0].grid_thw == made[1].grid_thw == (2, 4, 6)
        assert torch.equal(made[0].tensors["pixels"], made[1].tensors["pixels"])

    def test_wrong_values_of_the_file(self, make):
        with pytest.raises(CheckpointError, match="image_mean must be"):
            make({"image_mean": "half"})
