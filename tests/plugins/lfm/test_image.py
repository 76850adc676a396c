"""LFM2-VL's tiles: sizes, layouts and texts as transformers' processor, which needs torchvision;
pixels as Pillow resizes them."""

import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmdeploy_llm_plugins.lfm.image import (
    LfmImageProcessor,
    is_large,
    layout_of,
    small_size,
)
from PIL import Image
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

from mmdeploy_llm.errors import CheckpointError, ConfigError, MediaError
from mmdeploy_llm.hooks import Checkpoint

NAMES = (
    "smart_resize",
    "_is_image_too_large",
    "find_closest_aspect_ratio",
    "_target_ratios",
    "_get_grid_layout",
    "round_by_factor",
    "convert_image_to_patches",
)
FILE = {"tile_size": 64, "max_tiles": 6, "min_image_tokens": 2, "max_image_tokens": 8}


@pytest.fixture(scope="module")
def rules(rules_of):
    found = rules_of("lfm2_vl", *NAMES, kind="image")
    host = SimpleNamespace(_target_ratios=partial(found._target_ratios, None))
    found.layout = partial(found._get_grid_layout, host)
    return found


@pytest.fixture
def make(tmp_path):
    def processor(options=None, **file):
        config = SimpleNamespace(vision_config=SimpleNamespace(patch_size=16), downsample_factor=2)
        checkpoint = Checkpoint(folder=tmp_path, config=config, preprocessor={**FILE, **file})
        return LfmImageProcessor(checkpoint, options or {})

    return processor


def expected(rules, size, own):
    """Returns transformers' (columns, rows) and (height, width) of the small version."""
    width, height = size
    shared = (own.max_image_tokens, 16, 2, own.max_pixels_tolerance)
    small = rules.smart_resize(
        None, height, width, 2, own.min_image_tokens, own.max_image_tokens, 16
    )[::-1]
    if not rules._is_image_too_large(None, height, width, *shared):
        return (1, 1), small
    columns, rows, *_ = rules.layout(height, width, own.min_tiles, own.max_tiles, own.tile_size)
    return (columns, rows), small


def test_layouts_as_transformers(rules, make):
    rng, own = random.Random(3), make(tile_size=512, max_tiles=10, max_image_tokens=256).options
    for _ in range(1000):
        width = int(2 ** rng.uniform(0, 12))
        height = max(1, int(width * 2 ** rng.uniform(-4, 4)))
        (columns, rows), small = expected(rules, (width, height), own)
        assert small_size(height, width, own) == small
        assert is_large(height, width, own) == ((columns, rows) != (1, 1))
        layout = layout_of((width, height), own)
        assert (layout.columns, layout.rows, layout.small) == (columns, rows, small)


@pytest.mark.parametrize("size", [(30, 50), (64, 64), (200, 130), (400, 90), (90, 500)])
@pytest.mark.parametrize("has_thumbnail", [True, False])
def test_pixels_and_texts_as_transformers(size, has_thumbnail, rules, make, noise, limits):
    processor = make(use_thumbnail=has_thumbnail)
    item = processor.decode(noise(*size), limits)
    made = processor.process(item, {})
    (columns, rows), small = expected(rules, size, processor.options)
    parts = []
    if columns * rows > 1:
        whole = item.image.resize((64 * columns, 64 * rows), Image.Resampling.BILINEAR)
        boxes = [(64 * x, 64 * y) for y in range(rows) for x in range(columns)]
        parts = [whole.crop((x, y, x + 64, y + 64)) for x, y in boxes]
    if has_thumbnail or not parts:
        parts.append(item.image.resize(small[::-1], Image.Resampling.BILINEAR))
    want = torch.cat([patches(rules, part) for part in parts])
    assert torch.equal(channels_last(made.tensors["pixels"]), want)
    assert ("thumbnail" in made.tensors) == (len(parts) > 1 and has_thumbnail)
    host = SimpleNamespace(
        image_token="<image>",
        image_start_token="<|image_start|>",
        image_end_token="<|image_end|>",
        image_thumbnail_token="<|img_thumbnail|>",
    )
    tokens_of_small = small[0] // 32 * (small[1] // 32)
    text = Lfm2VlProcessor._build_image_tokens(
        host, rows, columns, 4, tokens_of_small, has_thumbnail, True
    )
    assert made.prompt_text == processor.prompt_text(item, {}) == text
    assert made.num_tokens == processor.count_tokens(item, {}) == text.count("<image>")


def patches(rules, image):
    """Returns transformers' patch rows of an image, in blocks of 2 x 2."""
    values = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    values = (values.float() / 255 - 0.5) / 0.5
    rows = rules.convert_image_to_patches(values, 16)[0]
    height, width = image.height // 16, image.width // 16
    blocks = rows.view(height // 2, 2, width // 2, 2, -1).transpose(1, 2)
    return blocks.reshape(height * width, -1)


def channels_last(pixels):
    return pixels.view(len(pixels), 3, -1).transpose(1, 2).flatten(1)


def test_options(make, noise, limits):
    processor = make({"min_tiles": 1, "max_tiles": 4})
    item = processor.decode(noise(300, 290), limits)
    assert processor.count_tokens(item, {}) == 4 * 4 + 4
    assert processor.count_tokens(item, {"do_image_splitting": False}) == 4
    assert processor.count_tokens(item, {"max_tiles": 1}) == 4
    with pytest.raises(MediaError, match="the engine allows 24"):
        processor.count_tokens(item, {"max_tiles": 5})
    with pytest.raises(MediaError, match="cannot set 'tile_size'"):
        processor.count_tokens(item, {"tile_size": 32})
    with pytest.raises(MediaError, match="is too long"):
        processor.count_tokens(processor.decode(noise(4000, 1), limits), {})
    with pytest.raises(ConfigError, match="no image option 'max_patches'"):
        make({"max_patches": 3})
    with pytest.raises(ConfigError, match="min_tiles = 7 is above max_tiles = 6"):
        make({"min_tiles": 7, "max_tiles": 6})
    with pytest.raises(CheckpointError, match="tile_size must be a multiple of 32"):
        make(tile_size=40)
