"""Gemma 3's images and crops equal those of transformers' PIL image processor, bit for bit; their
text is its processor's."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
from mmdeploy_llm_plugins.gemma.image3 import TOKENS, Gemma3ImageProcessor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

from mmdeploy_llm.errors import CheckpointError, ConfigError, MediaError
from mmdeploy_llm.hooks import Checkpoint

SIDE, PATCH, MERGE = 56, 14, 2
SIZE = {"height": SIDE, "width": SIDE}
PAN = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 20,
    "pan_and_scan_max_num_crops": 5,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}


@pytest.fixture
def make(tmp_path):
    """make(options, preprocessor=..., tokenizer=..., sizes): a processor."""

    def processor(options=None, *, preprocessor=None, tokenizer=None, tokens=4, **sizes):
        vision = SimpleNamespace(**{"image_size": SIDE, "patch_size": PATCH, **sizes})
        config = SimpleNamespace(vision_config=vision, mm_tokens_per_image=tokens)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer or {}), "utf-8")
        preprocessor = {"size": SIZE, **(preprocessor or {})}
        checkpoint = Checkpoint(folder=tmp_path, config=config, preprocessor=preprocessor)
        return Gemma3ImageProcessor(checkpoint, options or {})

    return processor


def in_blocks(pixels):
    """Patch rows of squares [I, 3, H, W], in blocks of patches."""
    num = SIDE // PATCH // MERGE
    cells = pixels.view(len(pixels), 3, num, MERGE, PATCH, num, MERGE, PATCH)
    return cells.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, 3 * PATCH**2)


def text_of(num_crops):
    """The text that transformers' processor writes."""
    one = f"\n\n<start_of_image>{'<image_soft_token>' * 4}<end_of_image>\n\n"
    host = SimpleNamespace(full_image_sequence=one)
    return Gemma3Processor.replace_image_token(host, {"num_crops": [num_crops]}, 0)


def assert_equal(processor, image, limits, of_all=None, **options):
    item = processor.decode(image, limits)
    ours = processor.process(item, options)
    defaults = Gemma3Processor.images_kwargs
    theirs = Gemma3ImageProcessorPil(**{"size": SIZE, **defaults, **(of_all or {})})
    expected = theirs(image, return_tensors="pt", **options)
    num = 1 + int(expected["num_crops"][0])
    assert ours.tensors["pixels"].dtype == torch.float32
    assert torch.equal(ours.tensors["pixels"], in_blocks(expected["pixel_values"]))
    assert ours.grid_thw == (num, 4, 4)
    assert ours.num_tokens == processor.count_tokens(item, options) == 4 * num
    assert ours.prompt_text == processor.prompt_text(item, options) == text_of(num - 1)
    return num - 1


@pytest.mark.one_is_quick
@pytest.mark.parametrize("options", [{}, PAN], ids=["squares", "pan and scan"])
def test_random_sizes_equal_transformers(options, make, noise, limits):
    rng, processor = random.Random(7), make(options)
    counts = set()
    for seed in range(40):
        width = rng.randint(1, 400)
        height = min(400, max(1, int(width * 2 ** rng.uniform(-4, 4))))
        counts.add(assert_equal(processor, noise(width, height, seed), limits, options))
    assert counts == ({0, 2, 3, 5} if options else {0})


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (300, 1), (56, 56), (67, 56), (56, 68)])
def test_tiny_and_extreme_sizes_equal_transformers(size, make, noise, limits):
    small = {**PAN, "pan_and_scan_min_crop_size": 1}
    assert_equal(make(), noise(*size), limits)
    assert_equal(make(small), noise(*size), limits, small)


@pytest.mark.parametrize(
    "options",
    [
        {"resample": 3},
        {"do_rescale": False},
        {"do_normalize": False},
        {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]},
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["file", "engine"])
def test_options_equal_transformers(options, where, make, noise, limits):
    processor = make(preprocessor=options) if where == "file" else make(options)
    assert_equal(processor, noise(230, 170), limits, options)


def test_the_file_does_not_turn_on_pan_and_scan(make, noise, limits):
    """transformers' processor sets the option itself and does not read the file's."""
    assert Gemma3Processor.images_kwargs["do_pan_and_scan"] is False
    assert assert_equal(make(preprocessor=PAN), noise(400, 100), limits) == 0


def test_one_image_can_be_cropped_less(make, noise, limits):
    processor, image = make(PAN), noise(400, 100)
    assert assert_equal(processor, image, limits, PAN) == 4
    assert assert_equal(processor, image, limits, PAN, pan_and_scan_max_num_crops=3) == 3
    assert assert_equal(processor, image, limits, PAN, do_pan_and_scan=False) == 0
    item = processor.decode(image, limits)
    assert processor.process(item, {}).key != processor.process(item, {"do_pan_and_scan": False})
    for options in ({"pan_and_scan_max_num_crops": 6}, {"do_normalize": False}):
        with pytest.raises(MediaError, match=r"allows 5|cannot set 'do_normalize'"):
            processor.process(item, options)
    with pytest.raises(MediaError, match="allow 4 crops of an image, the engine allows 0"):
        make().count_tokens(item, {"do_pan_and_scan": True})


def test_more_crops_than_pixels(make, noise, limits):
    processor = make({**PAN, "pan_and_scan_min_crop_size": 1, "pan_and_scan_max_num_crops": 4})
    with pytest.raises(MediaError, match="5 x 1 pixels cannot be cut into 4 crops of 2"):
        processor.count_tokens(processor.decode(noise(5, 1), limits), {})


def test_embeddings_and_the_largest_image(make):
    processor = make(PAN)
    assert processor.embedded(4, None, {}).prompt_text == text_of(0)
    assert processor.embedded(12, (3, 4, 4), {}).prompt_text == text_of(2)
    with pytest.raises(MediaError, match="4 rows for each tile"):
        processor.embedded(6, None, {})
    assert processor.largest(1000).num_tokens == 24
    assert processor.largest(11).num_tokens == 8
    assert processor.largest(3) is None
    assert make().largest(1000).num_tokens == 4


def test_texts_of_the_tokenizer(make):
    own = {"boi_token": "<a>", "eoi_token": {"content": "<b>"}, "image_token": "<t>"}
    processor = make(tokenizer={"extra_special_tokens": own})
    assert (processor.token, processor.markers) == ("<t>", ("<a>",))
    assert processor.embedded(4, None, {}).prompt_text == "\n\n<a><t><t><t><t><b>\n\n"
    assert make().markers == (TOKENS["boi_token"],)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("do_pan_and_scan", 1),
        ("pan_and_scan_min_crop_size", 0),
        ("pan_and_scan_max_num_crops", 65),
        ("pan_and_scan_max_num_crops", True),
        ("pan_and_scan_min_ratio_to_activate", float("nan")),
        ("pan_and_scan_min_ratio_to_activate", "1"),
    ],
)
def test_wrong_values(name, value, make):
    with pytest.raises(ConfigError, match=f"{name} must be"):
        make({name: value})


def test_unknown_options_are_refused(make):
    with pytest.raises(ConfigError, match="no image option 'max_pixels'"):
        make({"max_pixels": 10})


@pytest.mark.parametrize(
    "sizes", [{"image_size": 60}, {"patch_size": 0}, {"tokens": 5}, {"tokens": None}], ids=str
)
def test_sizes_that_no_tower_has(sizes, make):
    with pytest.raises(CheckpointError, match="mm_tokens_per_image"):
        make(**sizes)
