"""The largest item of a processor is one that it could make, and no real item is larger."""

import numpy as np
import pytest
from mmdeploy_llm_plugins.ernie.image import ErnieImageProcessor
from mmdeploy_llm_plugins.ernie.video import ErnieVideoProcessor
from mmdeploy_llm_plugins.paddleocr.image import PaddleOCRImageProcessor
from mmdeploy_llm_plugins.qwen.image import Qwen3ImageProcessor, QwenImageProcessor
from mmdeploy_llm_plugins.qwen.video import QwenVideoProcessor
from mmdeploy_llm_plugins.qwen.video3 import Qwen3VideoProcessor

from mmdeploy_llm.hooks import Checkpoint, MediaLimits

IMAGES = [ErnieImageProcessor, QwenImageProcessor, PaddleOCRImageProcessor]
VIDEOS = [ErnieVideoProcessor, QwenVideoProcessor, Qwen3VideoProcessor]
LIMITS = MediaLimits(isolation="thread")


def checkpoint(tmp_path):
    return Checkpoint(folder=tmp_path, config=None)


@pytest.mark.parametrize("make", IMAGES)
def test_images(make, tmp_path):
    processor = make(checkpoint(tmp_path), {"max_pixels": 500 * 500})
    found = processor.largest(10**6)
    large = processor.process(processor.decode(np.zeros((900, 900, 3), np.uint8), LIMITS), {})
    assert found.num_tokens == large.num_tokens
    assert found.grid_thw == large.grid_thw
    assert found.tensors["pixels"].shape == large.tensors["pixels"].shape


@pytest.mark.parametrize("make", VIDEOS)
def test_videos(make, tmp_path):
    options = {"video_max_pixels": 64 * 64, "video_min_pixels": 32 * 32}
    if make is Qwen3VideoProcessor:  # bounds the pixels of a whole video
        options = {"video_max_pixels": 20 * 64 * 64, "video_min_pixels": 32 * 32}
    options |= {"video_max_frames": 20, "video_min_frames": 4}
    processor = make(checkpoint(tmp_path), options)
    found = processor.largest(10**6)
    video = np.zeros((90, 128, 128, 3), np.uint8)
    item = processor.decode(video, LIMITS)
    large = processor.process(item, {"source_fps": 4.0, "fps": 2.0})
    if make is Qwen3VideoProcessor:  # fewer frames may be larger frames
        assert found.num_tokens >= large.num_tokens
        assert found.tensors["pixels"].shape[1] == large.tensors["pixels"].shape[1]
        return
    assert found.num_tokens == large.num_tokens
    assert found.grid_thw == large.grid_thw
    assert found.tensors["pixels"].shape == large.tensors["pixels"].shape


@pytest.mark.one_is_quick
@pytest.mark.parametrize("max_tokens", [1, 7, 100, 1000])
@pytest.mark.parametrize("make", [*IMAGES, Qwen3ImageProcessor, *VIDEOS])
def test_no_more_tokens_than_asked_for(make, max_tokens, tmp_path):
    found = make(checkpoint(tmp_path), {}).largest(max_tokens)
    assert max_tokens // 2 < found.num_tokens <= max_tokens
    steps, rows, columns = found.grid_thw
    assert len(found.tensors["pixels"]) == steps * rows * columns
