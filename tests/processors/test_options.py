"""mm_processor_kwargs and preprocessor_config.json: names, types, ranges, patch sizes."""

from types import SimpleNamespace

import pytest
import torch

from mmdeploy_llm.errors import CheckpointError, ConfigError, MediaError


def test_fastdeploy_names(make_processor):
    options = {"image_min_pixels": 784, "image_max_pixels": 78400, "spatial_conv_size": 2}
    resolved = make_processor("ernie", options=options).options
    assert (resolved.min_pixels, resolved.max_pixels, resolved.merge_size) == (784, 78400, 2)


def test_transformers_names_win_over_the_file(make_processor):
    file = {"size": {"shortest_edge": 3136, "longest_edge": 9999999}, "do_convert_rgb": True}
    resolved = make_processor(options={"max_pixels": 100352}, preprocessor=file).options
    assert (resolved.min_pixels, resolved.max_pixels) == (3136, 100352)


def test_video_options_are_left_to_the_video_processor(make_processor):
    make_processor(
        "ernie", options={"video_fps": 1, "video_max_frames": 8, "temporal_conv_size": 2}
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_max_pixel": 5}, "did you mean 'image_max_pixels'"),
        ({"zzz": 5}, "known: "),
        ({"max_pixels": "5"}, "whole number"),
        ({"max_pixels": True}, "whole number"),
        ({"max_pixels": 0}, "whole number"),
        ({"size": 5}, "shortest_edge"),
        ({"resample": 9}, "filter"),
        ({"image_std": [0.1, 0, 0.1]}, "none of them 0"),
        ({"image_mean": [0.1, 0.2]}, "three"),
        ({"min_pixels": 3136, "max_pixels": 784}, "is above max_pixels"),
        ({"min_pixels": 3136, "image_min_pixels": 3136}, "twice"),
    ],
    ids=str,
)
def test_wrong_options_are_config_errors(options, message, make_processor):
    with pytest.raises(ConfigError, match=message):
        make_processor(options=options)


def test_a_default_area_gives_way_with_room_for_whole_patches(make_processor):
    low, high = make_processor().options.min_pixels, make_processor().options.max_pixels
    few = make_processor(options={"max_pixels": low - 1}).options
    assert (few.min_pixels, few.max_pixels) == ((low - 1) // 4, low - 1)
    many = make_processor(options={"min_pixels": high + 1}).options
    assert (many.min_pixels, many.max_pixels) == (high + 1, 4 * (high + 1))


def test_one_image_may_be_smaller_than_a_default_minimum(make_processor, noise, limits):
    processor = make_processor()
    item = processor.decode(noise(640, 480), limits)
    few = {"max_pixels": processor.options.min_pixels // 2}
    assert processor.count_tokens(item, few) < processor.count_tokens(item, {})


def test_wrong_value_in_the_file_is_a_checkpoint_error(make_processor):
    with pytest.raises(CheckpointError, match=r"preprocessor_config.json: patch_size"):
        make_processor(preprocessor={"patch_size": -1})


def test_patches_must_be_those_of_the_vision_tower(make_processor):
    tower = SimpleNamespace(patch_size=14, spatial_merge_size=2)
    make_processor(vision_config=tower)
    with pytest.raises(ConfigError, match="merge_size = 4"):
        make_processor(vision_config=tower, options={"spatial_conv_size": 4})


@pytest.mark.one_is_quick
@pytest.mark.parametrize("family", ["ernie", "paddleocr", "qwen", "qwen3"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_pixels": 200_000},
        {"image_max_pixels": 200_000, "min_pixels": 190_000},
        {"min_pixels": 500_000},
        {"size": {"shortest_edge": 150_000, "longest_edge": 200_000}},
    ],
    ids=str,
)
def test_options_of_one_image_are_as_an_engines(family, options, make_processor, noise, limits):
    one, all_ = make_processor(family), make_processor(family, options=options)
    for size in ((640, 480), (90, 700)):
        item = one.decode(noise(*size), limits)
        found, expected = one.process(item, options), all_.process(item, {})
        assert torch.equal(found.tensors["pixels"], expected.tensors["pixels"])
        assert (found.grid_thw, found.key) == (expected.grid_thw, expected.key)
        assert one.count_tokens(item, options) == found.num_tokens == expected.num_tokens
        free = one.process(item, {})
        assert (free.key == found.key) == (one.options == all_.options)


@pytest.mark.parametrize(
    ("options", "engine", "message"),
    [
        ({"max_pixels": 10**9}, {}, "is above the engine's 1003520"),
        ({"max_pixels": 1000}, {"min_pixels": 3136}, "is above max_pixels = 1000"),
        ({"min_pixels": 2_000_000}, {}, "is above max_pixels"),
        ({"image_mean": 0.5}, {}, "cannot set image_mean, only min_pixels, max_pixels and size"),
        ({"fast_decode": True}, {}, "cannot set fast_decode"),
        ({"video_fps": 2}, {}, "cannot set video_fps"),
        ({"max_pixel": 9}, {}, "did you mean 'max_pixels'"),
        ({"max_pixels": 0}, {}, "whole number"),
        ({"max_pixels": 200_000}, {"fast_decode": True}, "one size for all prompts"),
        ({"max_pixels": 200_000}, {"do_resize": False}, "one size for all prompts"),
    ],
    ids=str,
)
def test_wrong_options_of_one_image(options, engine, message, make_processor, noise, limits):
    processor = make_processor("qwen", options=engine)
    item = processor.decode(noise(56, 56), limits)
    for method in (processor.process, processor.count_tokens):
        with pytest.raises(MediaError, match=message):
            method(item, options)
