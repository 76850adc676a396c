"""InternVL's tiles equal those of transformers' PIL image processor, bit for bit."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
from mmdeploy_llm_plugins.internvl.image import InternVLImageProcessor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from mmdeploy_llm.errors import CheckpointError, ConfigError, MediaError
from mmdeploy_llm.hooks import Checkpoint

SIDE = 56  # pixels of a tile: 2 x 2 tokens
SIZE = {"height": SIDE, "width": SIDE}


@pytest.fixture
def make(tmp_path):
    """make(options, preprocessor=..., tokenizer=..., tower's sizes): a processor."""

    def processor(options=None, *, preprocessor=None, tokenizer=None, ratio=0.5, **sizes):
        vision = SimpleNamespace(**{"image_size": (SIDE, SIDE), "patch_size": [14, 14], **sizes})
        config = SimpleNamespace(vision_config=vision, downsample_ratio=ratio)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer or {}), "utf-8")
        preprocessor = {"size": SIZE, **(preprocessor or {})}
        checkpoint = Checkpoint(folder=tmp_path, config=config, preprocessor=preprocessor)
        return InternVLImageProcessor(checkpoint, options or {})

    return processor


def reference(**options):
    """transformers' processor, with tiles as InternVLProcessor asks for them."""
    return GotOcr2ImageProcessorPil(**{"size": SIZE, "crop_to_patches": True, **options})


def in_blocks(pixels):
    """Patch rows of tiles [I, 3, H, W], in blocks of 2 x 2."""
    cells = pixels.view(len(pixels), 3, 2, 2, 14, 2, 2, 14)
    return cells.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(len(pixels) * 16, -1)


def assert_equal(processor, theirs, image, limits, **options):
    item = processor.decode(image, limits)
    ours = processor.process(item, options)
    expected = theirs(image, return_tensors="pt", **options)
    num_tiles = int(expected["num_patches"][0])
    assert ours.tensors["pixels"].dtype == torch.float32
    assert torch.equal(ours.tensors["pixels"], in_blocks(expected["pixel_values"]))
    assert ours.grid_thw == (num_tiles, 4, 4)
    assert ours.num_tokens == processor.count_tokens(item, options) == 4 * num_tiles
    text = f"<img>{'<IMG_CONTEXT>' * ours.num_tokens}</img>"
    assert ours.prompt_text == processor.prompt_text(item, options) == text


def test_random_sizes_equal_transformers(make, noise, limits):
    rng, processor, theirs = random.Random(7), make(), reference()
    for seed in range(30):
        width = rng.randint(1, 400)
        height = min(400, max(1, int(width * 2 ** rng.uniform(-6, 6))))
        assert_equal(processor, theirs, noise(width, height, seed), limits)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("size", [(1, 1), (1, 300), (300, 1), (56, 56), (57, 55), (112, 56)])
def test_tiny_and_extreme_sizes_equal_transformers(size, make, noise, limits):
    assert_equal(make(), reference(), noise(*size), limits)


def test_equal_aspects_take_more_tiles_for_larger_images(make, noise, limits):
    processor = make()
    counts = []
    for side in (40, 60, 90, 130):
        image = noise(side, side)
        assert_equal(processor, reference(), image, limits)
        counts.append(processor.count_tokens(processor.decode(image, limits), {}) // 4)
    assert counts == [1, 1, 5, 10]  # a thumbnail comes on top of several tiles


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    "options",
    [
        {"max_patches": 1},
        {"max_patches": 5},
        {"min_patches": 4, "max_patches": 6},
        {"min_patches": 7, "max_patches": 7},
        {"resample": 2},
        {"do_rescale": False},
        {"do_normalize": False},
        {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]},
        {"rescale_factor": 1 / 127.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["file", "engine"])
def test_options_equal_transformers(options, where, make, noise, limits):
    processor = make(preprocessor=options) if where == "file" else make(options)
    assert_equal(processor, reference(**options), noise(230, 170), limits)


def test_one_tile_for_all_images_or_for_one(make, noise, limits):
    image = noise(230, 170)
    assert_equal(make({"crop_to_patches": False}), reference(crop_to_patches=False), image, limits)
    assert_equal(make(), reference(), image, limits, crop_to_patches=False)
    assert_equal(make(), reference(), image, limits, max_patches=3)
    # transformers' InternVLProcessor tiles images whatever the file of the image processor says.
    assert_equal(make(preprocessor={"crop_to_patches": False}), reference(), image, limits)


def test_keys_differ_by_options(make, noise, limits):
    processor = make()
    item = processor.decode(noise(230, 170), limits)
    keys = {processor.process(item, options).key for options in ({}, {"max_patches": 3})}
    assert len(keys) == 2


def test_an_image_cannot_have_more_tiles_than_were_measured(make, noise, limits):
    processor = make({"max_patches": 4})
    item = processor.decode(noise(230, 170), limits)
    with pytest.raises(MediaError, match="allows more tiles than the engine's 5"):
        processor.process(item, {"max_patches": 6})
    with pytest.raises(MediaError, match="cannot set 'do_normalize'"):
        processor.count_tokens(item, {"do_normalize": False})
    largest = processor.largest(1000)
    assert largest.num_tokens == 20
    assert largest.tensors["pixels"].shape == (5 * 16, 3 * 14 * 14)
    assert processor.largest(11).num_tokens == 8
    assert processor.largest(3) is None


def test_embeddings_of_whole_tiles(make):
    processor = make()
    found = processor.embedded(12, None, {})
    assert found.num_tokens == 12
    assert found.prompt_text.count("<IMG_CONTEXT>") == 12
    assert processor.embedded(12, (3, 4, 4), {}).grid_thw == (3, 4, 4)
    for rows, grid in ((13, None), (0, None), (12, (1, 4, 4))):
        with pytest.raises(MediaError, match="4 rows for each tile"):
            processor.embedded(rows, grid, {})


def test_texts_of_the_tokenizer(make):
    own = {"context_image_token": "<ctx>", "start_image_token": {"content": "<a>"}}
    processor = make(tokenizer={"extra_special_tokens": own})
    assert processor.token == "<ctx>"
    assert processor.embedded(4, None, {}).prompt_text == f"<a>{'<ctx>' * 4}</img>"
    with pytest.raises(CheckpointError, match="context_image_token = 7"):
        make(tokenizer={"context_image_token": 7})


@pytest.mark.parametrize("options", [{"min_pixels": 1}, {"patch_size": 7}, {"fast_decode": True}])
def test_unknown_options_are_refused(options, make):
    with pytest.raises(ConfigError, match=f"no image option '{next(iter(options))}'"):
        make(options)


@pytest.mark.parametrize("value", [0, -1, 1.5, "6", True, 2**40])
def test_wrong_numbers_of_tiles(value, make):
    with pytest.raises(ConfigError, match="max_patches must be a whole number from 1 to 1024"):
        make({"max_patches": value})
    with pytest.raises(CheckpointError, match="max_patches must be a whole number"):
        make(preprocessor={"max_patches": value})


def test_bounds_that_exclude_each_other(make):
    with pytest.raises(ConfigError, match="min_patches = 9 is above max_patches = 3"):
        make({"min_patches": 9, "max_patches": 3})


@pytest.mark.parametrize("size", [{"height": 448, "width": 448}, {"shortest_edge": 56}, 56, "56"])
def test_tiles_of_another_size_than_the_tower(size, make):
    with pytest.raises(CheckpointError, match="vision tower is 56"):
        make(preprocessor={"size": size})


@pytest.mark.parametrize(
    "sizes",
    [
        {"image_size": 0},
        {"image_size": (-56, -56)},
        {"image_size": []},
        {"image_size": 2**40},
        {"patch_size": "14"},
        {"patch_size": 0},
        {"image_size": 70},
        {"ratio": 0},
        {"ratio": -0.5},
        {"ratio": "half"},
        {"ratio": float("nan")},
    ],
    ids=str,
)
def test_sizes_that_no_tower_has(sizes, make):
    with pytest.raises(CheckpointError, match="downsample_ratio"):
        make(**sizes)
