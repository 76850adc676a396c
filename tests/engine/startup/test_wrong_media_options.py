"""Options with which every picture or video would fail are told before the weights are read."""

import pytest

from mmdeploy_llm import LLM, ConfigError
from mmdeploy_llm.engine.startup import start


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"video_fps": 0, "video_target_frames": -1}, "no video can be used: Must provide either"),
        ({"video_target_frames": 10**9, "video_fps": -1}, "no video can be used: target_frames"),
        ({"video_min_frames": 9, "video_max_frames": 3}, "video_min_frames = 9 is above"),
        ({"video_fsp": 3}, "did you mean 'video_fps'"),
        ({"video_fps": "fast"}, "video_fps must be a number"),
        ({"min_pixel": 3}, "did you mean 'min_pixels'"),
    ],
)
def test_they_are_told_before_the_weights_are_read(monkeypatch, options, words):
    monkeypatch.setattr(start, "build_computer", None)  # reads the weights
    with pytest.raises(ConfigError, match=words):
        LLM("shapes-vl", mm_processor_kwargs=options, quiet=True)
