"""Frames are selected by FastDeploy's rules."""

import numpy as np
import pytest
from mmdeploy_llm_plugins.ernie.frames import choose_frames
from mmdeploy_llm_plugins.ernie.video import ErnieVideoProcessor
from mmdeploy_llm_processors.video.options import item_options

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.media.video.timeline import Timeline, constant_timeline

ERNIE = ErnieVideoProcessor.default
DIGEST = "0123456789abcdef0123"


def ernie(seconds, rate, **options):
    timeline = constant_timeline(64, 48, round(seconds * rate), rate)
    return choose_frames(timeline, item_options(ERNIE, options), DIGEST)


def test_two_frames_a_second_by_default():
    assert ernie(20, 30) == list(range(0, 600, 15))


def test_at_least_min_frames_evenly():
    cuts = np.linspace(0, 90, 17).astype(int)
    assert ernie(3, 30) == cuts[:-1].tolist()


def test_at_most_max_frames_evenly():
    cuts = np.linspace(0, 6000, 181).astype(int)
    assert ernie(200, 30) == cuts[:-1].tolist()


def test_a_short_clip_gives_all_it_has():
    assert ernie(0.5, 10) == list(range(5))


def test_fps_rounds_half_to_even():
    """Frame indices are second x rate, rounded as by numpy; those past the end are dropped."""
    assert ernie(5, 5, fps=2, min_frames=1) == [0, 2, 5, 8, 10, 12, 15, 18, 20, 22]


def test_middle():
    assert ernie(5, 8, fps=1, min_frames=1, frames_sample="middle") == [4, 12, 20, 28, 36]


def test_target_frames():
    options = {"target_frames": 4, "fps": -1, "min_frames": 1}
    assert ernie(10, 10, **options) == [0, 25, 50, 75]
    assert ernie(10, 10, **options, frames_sample="middle") == [12, 37, 62, 87]


def test_rand_is_random_but_the_same_each_time():
    options = {"target_frames": 8, "fps": -1, "min_frames": 1, "frames_sample": "rand"}
    first, again = ernie(10, 10, **options), ernie(10, 10, **options)
    assert first == again
    assert first != ernie(10, 10, **{**options, "frames_sample": "leading"})
    cuts = np.linspace(0, 100, 9).astype(int)
    for index, low, high in zip(first, cuts[:-1], cuts[1:], strict=True):
        assert low <= index < high


def test_rand_by_rate_stays_near_the_middle():
    found = ernie(10, 20, fps=2, min_frames=1, frames_sample="rand")
    middles = np.arange(0.25, 10, 0.5) * 20
    assert len(found) == len(middles)
    assert all(abs(index - middle) <= 6 for index, middle in zip(found, middles, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_frames": 20, "fps": 2}, "fps must be negative if target_frames is given"),
        (
            {"target_frames": 8, "min_frames": 16},
            "target_frames must be larger than min_frames: 8 is below 16",
        ),
        (
            {"target_frames": 200, "fps": -1, "max_frames": 180},
            "target_frames must be smaller than max_frames: 200 is over 180",
        ),
        ({"fps": -1}, "Must provide either positive target_fps or positive target_frames"),
        ({"min_frames": 9, "max_frames": 8}, "min_frames = 9 must not be larger than"),
    ],
)
def test_contradictions(options, message):
    with pytest.raises(MediaError, match=message):
        ernie(10, 10, **options)


def test_variable_rate_goes_by_time():
    """A long still frame covers several seconds; it is used once."""
    times = [0.0, 0.1, 0.2, 0.3, 5.0, 5.1]
    timeline = Timeline(width=9, height=9, times=times, duration=5.2, is_constant=False)
    options = item_options(ERNIE, {"fps": 1, "min_frames": 1})
    assert choose_frames(timeline, options, DIGEST) == [0, 3, 4]
