"""Frames are selected by transformers' rules."""

import itertools
from types import SimpleNamespace

import pytest
from mmdeploy_llm_plugins.qwen.video import QwenVideoProcessor, qwen_frames
from mmdeploy_llm_processors.video.options import item_options

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.media.video.timeline import constant_timeline

QWEN = QwenVideoProcessor.default


def qwen(num, rate, **options):
    return qwen_frames(constant_timeline(64, 48, num, rate), item_options(QWEN, options), 2)


@pytest.fixture(scope="session")
def transformers_frames(rules_of):
    """(frames, rate, options) -> frame indices."""
    sample_frames = rules_of("qwen2_vl", "sample_frames").sample_frames
    host = SimpleNamespace(
        num_frames=None, fps=None, temporal_patch_size=2, min_frames=4, max_frames=768
    )

    def frames(num, rate, **options):
        metadata = SimpleNamespace(total_num_frames=num, fps=rate)
        return sample_frames(host, metadata, **options).tolist()

    return frames


@pytest.mark.parametrize("options", [{}, {"fps": 1.0}, {"fps": 5.0, "max_frames": 20}])
def test_as_transformers(transformers_frames, options):
    nums, rates = (2, 3, 4, 5, 7, 30, 31, 100, 1000, 2401), (1.0, 10.0, 24.0, 29.97)
    for num, rate in itertools.product(nums, rates):
        wanted = transformers_frames(num, rate, **{"fps": 2.0, **options})
        assert qwen(num, rate, **options) == wanted, (num, rate)


@pytest.mark.parametrize("count", [2, 5, 8, 30])
def test_target_frames_as_transformers(transformers_frames, count):
    want = transformers_frames(77, 10.0, num_frames=count)
    assert qwen(77, 10, target_frames=count, fps=-1) == want


def test_one_frame():
    assert qwen(1, 10) == [0]


def test_more_than_there_are():
    with pytest.raises(MediaError, match="target_frames = 40, but the video has 10 frames"):
        qwen(10, 10, target_frames=40)
