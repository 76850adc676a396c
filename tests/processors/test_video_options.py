"""Options of videos: of a family, a file, an engine and one video."""

import pytest
from mmdeploy_llm_plugins.ernie.video import ErnieVideoProcessor
from mmdeploy_llm_plugins.qwen.video import QwenVideoProcessor
from mmdeploy_llm_processors.video.options import VideoOptions, engine_options, item_options

from mmdeploy_llm.errors import CheckpointError, ConfigError, MediaError

ERNIE, QWEN = ErnieVideoProcessor.default, QwenVideoProcessor.default


def test_item_beats_engine_beats_file_beats_family():
    file = {"size": {"shortest_edge": 100, "longest_edge": 200}, "fps": 1, "max_frames": 50}
    options = engine_options(ERNIE, file, {"video_max_frames": 40, "image_max_pixels": 9})
    assert (options.min_pixels, options.max_pixels) == (100, 200)
    assert (options.fps, options.max_frames, options.min_frames) == (1, 40, 16)
    assert item_options(options, {"max_frames": 30}).max_frames == 30


def test_names_of_transformers():
    assert engine_options(QWEN, {"num_frames": 8}, {}).target_frames == 8
    assert item_options(QWEN, {"num_frames": 6}).target_frames == 6


def test_unknown_names():
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
def test_wrong_values(name, value):
    with pytest.raises(MediaError, match=f"{name} must be"):
        item_options(ERNIE, {name: value})
    with pytest.raises(ConfigError, match=f"video_{name} must be"):
        engine_options(ERNIE, {}, {f"video_{name}": value})
    with pytest.raises(CheckpointError, match=f"{name} must be"):
        engine_options(ERNIE, {name: value}, {})


def test_given_bounds_that_cross():
    with pytest.raises(ConfigError, match="video_min_pixels = 999999999 is above"):
        engine_options(ERNIE, {}, {"video_min_pixels": 999_999_999, "video_max_pixels": 9})
    with pytest.raises(ConfigError, match="video_min_frames = 9 is above"):
        engine_options(ERNIE, {}, {"video_min_frames": 9, "video_max_frames": 4})
    with pytest.raises(MediaError, match="min_frames = 9 must not be larger than max_frames = 4"):
        item_options(ERNIE, {"min_frames": 9, "max_frames": 4})
    engine = engine_options(ERNIE, {}, {"video_min_frames": 9})
    with pytest.raises(MediaError, match="min_frames = 9 must not be larger than max_frames = 4"):
        item_options(engine, {"max_frames": 4})


def test_fps_and_target_frames_that_are_both_given():
    both = {"fps": 2, "target_frames": 8}
    with pytest.raises(MediaError, match="fps must be negative if target_frames is given"):
        item_options(QWEN, both)
    with pytest.raises(ConfigError, match="fps must be negative if target_frames is given"):
        engine_options(QWEN, {}, {f"video_{name}": value for name, value in both.items()})
    assert item_options(QWEN, {**both, "fps": -1}).target_frames == 8


@pytest.mark.parametrize(
    ("given", "resolved"),
    [
        ({"max_frames": 4}, {"max_frames": 4, "min_frames": 4, "fps": 2}),
        ({"min_frames": 200}, {"min_frames": 200, "max_frames": 200}),
        ({"target_frames": 8}, {"target_frames": 8, "fps": -1, "min_frames": 8}),
        ({"target_frames": 200}, {"target_frames": 200, "fps": -1, "max_frames": 200}),
        ({"target_frames": -1}, {"target_frames": -1, "fps": 2}),
        ({"fps": 1}, {"fps": 1, "target_frames": -1, "min_frames": 16}),
    ],
    ids=str,
)
def test_defaults_that_contradict_what_is_given_give_way(given, resolved):
    found = item_options(ERNIE, given)
    assert {name: getattr(found, name) for name in resolved} == resolved
    engine = engine_options(ERNIE, {}, {f"video_{name}": value for name, value in given.items()})
    assert {name: getattr(engine, name) for name in resolved} == resolved


def test_what_is_nearer_to_the_video_decides_how_its_frames_are_counted():
    file = {"num_frames": 32, "fps": 1}
    assert engine_options(ERNIE, file, {"video_fps": 4}).target_frames == -1
    engine = engine_options(ERNIE, {}, {"video_target_frames": 20})
    assert item_options(engine, {"fps": 4}).target_frames == -1
    assert item_options(engine_options(ERNIE, {}, {"video_fps": 4}), {"num_frames": 20}).fps == -1
    assert engine_options(ERNIE, file, {"video_max_frames": 8}).target_frames == 8


def test_a_default_area_gives_way_with_room_for_whole_patches():
    assert engine_options(ERNIE, {}, {"video_max_pixels": 4000}).min_pixels == 1000
    assert engine_options(ERNIE, {}, {"video_min_pixels": 2_000_000}).max_pixels == 8_000_000
    assert engine_options(ERNIE, {}, {"video_max_pixels": 3}).min_pixels == 1


def test_defaults():
    assert VideoOptions(min_pixels=1, max_pixels=2).frames_sample == "leading"
    assert (QWEN.min_frames, QWEN.max_frames, QWEN.fps) == (4, 768, 2.0)
