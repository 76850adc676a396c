"""MiniCPM-V's images and slices equal those of transformers' PIL image processor, bit for bit;
their text is its processor's."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
from mmdeploy_llm_plugins.minicpm.image import TOKENS, MiniCPMImageProcessor
from transformers.models.minicpmv4_6 import image_processing_pil_minicpmv4_6 as pil
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor

from mmdeploy_llm.errors import CheckpointError, ConfigError, MediaError
from mmdeploy_llm.hooks import ITEM_NUMBER, Checkpoint

PATCH = 14
SMALL = {"scale_resolution": 112}


@pytest.fixture
def make(tmp_path):
    """make(options, file, tokenizer=..., patch_size=...): a processor."""

    def processor(options=None, file=None, *, tokenizer=None, patch_size=PATCH):
        config = SimpleNamespace(vision_config=SimpleNamespace(patch_size=patch_size))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer or {}), "utf-8")
        checkpoint = Checkpoint(folder=tmp_path, config=config, preprocessor=file or SMALL)
        return MiniCPMImageProcessor(checkpoint, options or {})

    return processor


def in_blocks(strips, sizes, merge):
    """Patch rows of slices side by side, [3, P, sum of patches * P], in blocks of patches."""
    patches = strips.view(3, PATCH, -1, PATCH).permute(2, 0, 1, 3).flatten(1)
    found = []
    for (rows, columns), part in zip(
        sizes.tolist(), patches.split(sizes.prod(-1).tolist()), strict=True
    ):
        cells = part.view(rows // merge, merge, columns // merge, merge, -1)
        found.append(cells.transpose(1, 2).flatten(0, 3))
    return torch.cat(found)


def text_of(made, merge, *, has_id):
    """The text that transformers' processor writes."""
    host = SimpleNamespace(**TOKENS, slice_mode=True)
    text = MiniCPMV4_6Processor.replace_image_token(host, made, 0, image_token_divisor=merge**2)
    return f"<image_id>{ITEM_NUMBER}</image_id>{text}" if has_id else text


def assert_equal(processor, image, limits, options, **of_item):
    """Compares with transformers' processor and returns the number of slices."""
    item = processor.decode(image, limits)
    ours = processor.process(item, of_item)
    given = {**SMALL, **options, **of_item}
    has_id = given.pop("use_image_id", True)
    theirs = pil.MiniCPMV4_6ImageProcessorPil(**given)(image, return_tensors="pt")
    merge = 2 if given.get("downsample_mode") == "4x" else 4
    sizes = theirs["target_sizes"]
    assert ours.tensors["pixels"].dtype == torch.float32
    assert torch.equal(ours.tensors["pixels"], in_blocks(theirs["pixel_values"][0], sizes, merge))
    assert ours.grid_thw == (1, *sizes[0].tolist())
    num_slices = len(sizes) - 1
    if num_slices:
        assert ours.tensors["tiles"].tolist() == [
            [1, *sizes[0].tolist()],
            [num_slices, *sizes[1].tolist()],
        ]
    assert ours.num_tokens == int(sizes.prod(-1).sum()) // merge**2
    assert ours.num_tokens == processor.count_tokens(item, of_item)
    written = text_of(theirs, merge, has_id=has_id)
    assert ours.prompt_text == processor.prompt_text(item, of_item) == written
    return num_slices


@pytest.mark.full
@pytest.mark.parametrize("mode", ["16x", pytest.param("4x", marks=pytest.mark.full)])
def test_random_sizes_equal_transformers(mode, make, noise, limits):
    rng, options = random.Random(7), {"downsample_mode": mode}
    processor, counts = make(options), set()
    for seed in range(40):
        width = rng.randint(1, 400)
        height = min(400, max(1, int(width * 2 ** rng.uniform(-4, 4))))
        counts.add(assert_equal(processor, noise(width, height, seed), limits, options))
    assert {0, 2, 4, 9} <= counts


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    "size",
    [
        (1, 1),
        (1, 200),
        (200, 1),
        (112, 112),
        (113, 112),
        (168, 168),
        (2240, 12),
        (241, 1),
        (3, 900),
    ],
)
def test_tiny_and_extreme_sizes_equal_transformers(size, make, noise, limits):
    assert_equal(make(), noise(*size), limits, {})


def test_a_size_beyond_all_others_is_refused(make, noise, limits):
    processor = make()
    with pytest.raises(MediaError, match=r"12000 x 1 pixels has \d+ tokens, \d+ are allowed"):
        processor.count_tokens(processor.decode(noise(12000, 1), limits), {})


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    "options",
    [
        {"resample": 2},
        {"do_rescale": False},
        {"do_normalize": False},
        {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]},
        {"max_slice_nums": 4},
        {"slice_mode": False},
        {"use_image_id": False},
        {"scale_resolution": 150},
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["file", "engine"])
def test_options_equal_transformers(options, where, make, noise, limits):
    processor = make({}, {**SMALL, **options}) if where == "file" else make(options)
    assert_equal(processor, noise(330, 170), limits, options)


def test_one_image_can_have_fewer_slices(make, noise, limits):
    processor, image = make(), noise(400, 300)
    assert assert_equal(processor, image, limits, {}) == 9
    assert assert_equal(processor, image, limits, {}, max_slice_nums=4) == 4
    assert assert_equal(processor, image, limits, {}, slice_mode=False) == 0
    assert assert_equal(processor, image, limits, {}, use_image_id=False) == 9
    item = processor.decode(image, limits)
    assert processor.process(item, {}).key != processor.process(item, {"slice_mode": False}).key
    wrong = {"max_slice_nums": 10, "downsample_mode": "4x", "slice_mode": "no"}
    for name, value in wrong.items():
        with pytest.raises(MediaError, match=r"engine allows 9|cannot set|must be True"):
            processor.process(item, {name: value})
    with pytest.raises(MediaError, match="allow 9 slices of an image, the engine allows 0"):
        make({"slice_mode": False}).count_tokens(item, {"slice_mode": True})


def test_embeddings_and_the_largest_image(make, noise, limits):
    processor = make()
    text = f"<image_id>{ITEM_NUMBER}</image_id><image>{'<|image_pad|>' * 6}</image>"
    assert processor.embedded(6, (1, 8, 12), {}).prompt_text == text
    with pytest.raises(MediaError, match="cannot be merged"):
        processor.embedded(6, (1, 6, 12), {})
    with pytest.raises(MediaError, match="need a 'grid'"):
        processor.embedded(6, None, {})
    assert processor.largest(1000).num_tokens == 90
    assert processor.largest(20).num_tokens == 18
    assert processor.largest(8) is None
    assert make({"slice_mode": False}).largest(1000).num_tokens == 9
    longest = processor.decode(noise(2400, 12), limits)
    assert processor.count_tokens(longest, {}) <= 90


def test_texts_of_the_tokenizer(make):
    own = {"image_start_token": "<a>", "image_id_end_token": {"content": "<b>"}, "image_token": "_"}
    processor = make(tokenizer={"extra_special_tokens": own})
    assert (processor.token, processor.markers) == ("_", ("_",))
    text = f"<image_id>{ITEM_NUMBER}<b><a>_</image>"
    assert processor.embedded(1, (1, 4, 4), {}).prompt_text == text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_slice_nums", 0),
        ("max_slice_nums", True),
        ("scale_resolution", 2**20),
        ("slice_mode", 1),
        ("use_image_id", "yes"),
        ("downsample_mode", "2x"),
        ("downsample_mode", []),
    ],
)
def test_wrong_values(name, value, make):
    with pytest.raises(ConfigError, match=f"{name} must be"):
        make({name: value})
    with pytest.raises(CheckpointError, match=f"{name} must be"):
        make({}, {name: value})


def test_unknown_options_are_refused(make):
    with pytest.raises(ConfigError, match="no image option 'max_pixels'"):
        make({"max_pixels": 10})


@pytest.mark.parametrize("patch_size", [0, None, 2**11, [14, 14]])
def test_patches_that_no_tower_has(patch_size, make):
    with pytest.raises(CheckpointError, match="patch_size"):
        make(patch_size=patch_size)
