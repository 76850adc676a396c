"""Frames are selected by FastDeploy's rules for ERNIE and by transformers' for Qwen."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from mmdeploy_llm_processors.video.options import VideoOptions, engine_options, item_options
from mmdeploy_llm_processors.video.processor import ErnieVideoProcessor, QwenVideoProcessor
from mmdeploy_llm_processors.video.select import ernie_frames, qwen_frames
from mmdeploy_llm_processors.video.timeline import Timeline, constant_timeline

from mmdeploy_llm.errors import CheckpointError, ConfigError, MediaError

ERNIE, QWEN = ErnieVideoProcessor.default, QwenVideoProcessor.default
DIGEST = "0123456789abcdef0123"


def ernie(seconds, rate, **options):
    timeline = constant_timeline(64, 48, round(seconds * rate), rate)
    return ernie_frames(timeline, item_options(ERNIE, options), DIGEST)


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


class TestErnie:
    def test_two_frames_a_second_by_default(self):
        assert ernie(20, 30) == list(range(0, 600, 15))

    def test_at_least_min_frames_evenly(self):
        cuts = np.linspace(0, 90, 17).astype(int)
        assert ernie(3, 30) == cuts[:-1].tolist()

    def test_at_most_max_frames_evenly(self):
        cuts = np.linspace(0, 6000, 181).astype(int)
        assert ernie(200, 30) == cuts[:-1].tolist()

    def test_a_short_clip_gives_all_it_has(self):
        assert ernie(0.5, 10) == list(range(5))

    def test_fps_rounds_half_to_even(self):
        """Frame indices are second x rate, rounded as by numpy; those past the end are dropped."""
        assert ernie(5, 5, fps=2, min_frames=1) == [0, 2, 5, 8, 10, 12, 15, 18, 20, 22]

    def test_middle(self):
        assert ernie(5, 8, fps=1, min_frames=1, frames_sample="middle") == [4, 12, 20, 28, 36]

    def test_target_frames(self):
        options = {"target_frames": 4, "fps": -1, "min_frames": 1}
        assert ernie(10, 10, **options) == [0, 25, 50, 75]
        assert ernie(10, 10, **options, frames_sample="middle") == [12, 37, 62, 87]

    def test_rand_is_random_but_the_same_each_time(self):
        options = {"target_frames": 8, "fps": -1, "min_frames": 1, "frames_sample": "rand"}
        first, again = ernie(10, 10, **options), ernie(10, 10, **options)
        assert first == again
        assert first != ernie(10, 10, **{**options, "frames_sample": "leading"})
        cuts = np.linspace(0, 100, 9).astype(int)
        for index, low, high in zip(first, cuts[:-1], cuts[1:], strict=True):
            assert low <= index < high

    def test_rand_by_rate_stays_near_the_middle(self):
        found = ernie(10, 20, fps=2, min_frames=1, frames_sample="rand")
        middles = np.arange(0.25, 10, 0.5) * 20
        assert len(found) == len(middles)
        assert all(abs(index - middle) <= 6 for index, middle in zip(found, middles, strict=True))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"target_frames": 20}, "fps must be negative if target_frames is given"),
            (
                {"target_frames": 8, "fps": -1},
                "target_frames must be larger than min_frames: 8 is below 16",
            ),
            (
                {"target_frames": 200, "fps": -1},
                "target_frames must be smaller than max_frames: 200 is over 180",
            ),
            ({"fps": -1}, "Must provide either positive target_fps or positive target_frames"),
            ({"min_frames": 9, "max_frames": 8}, "min_frames = 9 must not be larger than"),
        ],
    )
    def test_contradictions(self, options, message):
        with pytest.raises(MediaError, match=message):
            ernie(10, 10, **options)

    def test_variable_rate_goes_by_time(self):
        """A long still frame covers several seconds; it is used once."""
        times = [0.0, 0.1, 0.2, 0.3, 5.0, 5.1]
        timeline = Timeline(width=9, height=9, times=times, duration=5.2, is_constant=False)
        options = item_options(ERNIE, {"fps": 1, "min_frames": 1})
        assert ernie_frames(timeline, options, DIGEST) == [0, 3, 4]


class TestQwen:
    @pytest.mark.parametrize("options", [{}, {"fps": 1.0}, {"fps": 5.0, "max_frames": 20}])
    def test_as_transformers(self, transformers_frames, options):
        nums, rates = (2, 3, 4, 5, 7, 30, 31, 100, 1000, 2401), (1.0, 10.0, 24.0, 29.97)
        for num, rate in itertools.product(nums, rates):
            wanted = transformers_frames(num, rate, **{"fps": 2.0, **options})
            assert qwen(num, rate, **options) == wanted, (num, rate)

    @pytest.mark.parametrize("count", [2, 5, 8, 30])
    def test_target_frames_as_transformers(self, transformers_frames, count):
        want = transformers_frames(77, 10.0, num_frames=count)
        assert qwen(77, 10, target_frames=count, fps=-1) == want

    def test_one_frame(self):
        assert qwen(1, 10) == [0]

    def test_more_than_there_are(self):
        with pytest.raises(MediaError, match="target_frames = 40, but the video has 10 frames"):
            qwen(10, 10, target_frames=40)


class TestOptions:
    def test_item_beats_engine_beats_file_beats_family(self):
        file = {"size": {"shortest_edge": 100, "longest_edge": 200}, "fps": 1, "max_frames": 50}
        options = engine_options(ERNIE, file, {"video_max_frames": 40, "image_max_pixels": 9})
        assert (options.min_pixels, options.max_pixels) == (100, 200)
        assert (options.fps, options.max_frames, options.min_frames) == (1, 40, 16)
        assert item_options(options, {"max_frames": 30}).max_frames == 30

    def test_names_of_transformers(self):
        assert engine_options(QWEN, {"num_frames": 8}, {}).target_frames == 8
        assert item_options(QWEN, {"num_frames": 6}).target_frames == 6

    def test_unknown_names(self):
        with pytest.raises(ConfigError, match="did you mean 'video_max_frames'"):
            engine_options(ERNIE, {}, {"video_max_frame": 3})
        with pytest.raises(MediaError, match="did you mean 'max_frames'"):
            item_options(ERNIE, {"max_frame": 3})

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("fps", "2"),
            ("fps", float("nan")),
            ("max_frames", 0),
            ("max_frames", True),
            ("min_frames", 1.5),
            ("target_frames", -2),
            ("frames_sample", "last"),
            ("draw_on_frames", 1),
            ("source_fps", 0),
        ],
    )
    def test_wrong_values(self, name, value):
        with pytest.raises(MediaError, match=f"{name} must be"):
            item_options(ERNIE, {name: value})
        with pytest.raises(ConfigError, match=f"video_{name} must be"):
            engine_options(ERNIE, {}, {f"video_{name}": value})
        with pytest.raises(CheckpointError, match=f"{name} must be"):
            engine_options(ERNIE, {name: value}, {})

    def test_bounds_that_cross(self):
        with pytest.raises(ConfigError, match="video_min_pixels = 999999999 is above"):
            engine_options(ERNIE, {}, {"video_min_pixels": 999_999_999})

    def test_defaults(self):
        assert VideoOptions(min_pixels=1, max_pixels=2).frames_sample == "leading"
        assert (QWEN.min_frames, QWEN.max_frames, QWEN.fps) == (4, 768, 2.0)
