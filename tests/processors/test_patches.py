"""Pixel values and grids equal those of transformers' PIL image processors, bit for bit."""

import random

import pytest
import torch
from mmdeploy_llm_processors.image.options import ImageOptions
from mmdeploy_llm_processors.image.patches import fit_size
from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import (
    Ernie4_5_VLMoeImageProcessorPil,
)
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    PaddleOCRVLImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from mmdeploy_llm.errors import MediaError

# The file of the published Qwen3-VL checkpoints, whose image processor is Qwen2-VL's.
QWEN3 = {
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "patch_size": 16,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def qwen3_reference(**options):
    return Qwen2VLImageProcessorPil(**{**QWEN3, **options})


REFERENCE = {
    "ernie": Ernie4_5_VLMoeImageProcessorPil,
    "glm": Glm4vImageProcessorPil,
    "paddleocr": PaddleOCRVLImageProcessorPil,
    "qwen": Qwen2VLImageProcessorPil,
    "qwen3": qwen3_reference,
}


def in_blocks(theirs, options):
    """Orders transformers' patch rows in merged blocks; only PaddleOCR-VL's patches, which are
    separate images, come row by row."""
    pixels = theirs["pixel_values"]
    if pixels.ndim == 2:
        return pixels
    [(_, height, width)] = theirs["image_grid_thw"].tolist()
    merge = options.merge_size
    blocks = pixels.view(height // merge, merge, width // merge, merge, -1).transpose(1, 2)
    return blocks.reshape(height * width, -1)


def assert_equal(processor, reference, image, limits):
    item = processor.decode(image, limits)
    ours = processor.process(item, {})
    theirs = reference(image, return_tensors="pt")
    assert list(ours.grid_thw) == theirs["image_grid_thw"][0].tolist()
    assert ours.tensors["pixels"].dtype == torch.float32
    assert torch.equal(ours.tensors["pixels"], in_blocks(theirs, processor.options))
    num_tokens = theirs["image_grid_thw"].prod() // processor.options.merge_size**2
    assert ours.num_tokens == processor.count_tokens(item, {}) == num_tokens


@pytest.mark.one_is_quick
@pytest.mark.parametrize("family", REFERENCE)
def test_random_sizes_equal_transformers(family, make_processor, noise, limits):
    rng, processor, reference = random.Random(7), make_processor(family), REFERENCE[family]()
    for seed in range(25):
        width = rng.randint(1, 500)
        height = min(500, max(1, int(width * 2 ** rng.uniform(-7, 7))))
        if max(width, height) <= 200 * min(width, height):
            assert_equal(processor, reference, noise(width, height, seed), limits)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("family", REFERENCE)
@pytest.mark.parametrize(
    "size", [(1, 1), (1, 200), (200, 1), (27, 29), (28, 28), (2, 399), (56, 56)]
)
def test_cve_2026_22773_tiny_and_extreme_sizes_equal_transformers(
    family, size, make_processor, noise, limits
):
    assert_equal(make_processor(family), REFERENCE[family](), noise(*size), limits)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("family", REFERENCE)
@pytest.mark.parametrize(
    "options",
    [
        {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 6}},
        {"resample": 2},
        {"do_rescale": False},
        {"do_normalize": False},
        {"do_normalize": False, "do_rescale": False},
        {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]},
        {"image_mean": 0.5, "image_std": 0.25},
        {"rescale_factor": 1 / 127.5},
        {"patch_size": 16, "merge_size": 1},
        {"patch_size": 7},
        {"temporal_patch_size": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["file", "engine"])
def test_options_equal_transformers(family, options, where, make_processor, noise, limits):
    if where == "file":
        processor = make_processor(family, preprocessor=options)
    else:
        processor = make_processor(family, options=options)
    assert_equal(processor, REFERENCE[family](**options), noise(230, 170), limits)


def test_without_resizing_the_size_must_fit(make_processor, noise, limits):
    processor = make_processor(options={"do_resize": False})
    assert_equal(processor, Qwen2VLImageProcessorPil(do_resize=False), noise(56, 84), limits)
    with pytest.raises(MediaError, match="multiple of 28"):
        processor.process(processor.decode(noise(57, 84), limits), {})


def test_qwen_reads_pixel_bounds_of_the_file_and_ernie_does_not(make_processor):
    bounds = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 4}
    assert make_processor("qwen", preprocessor=bounds).options.max_pixels == 28 * 28 * 4
    assert make_processor("ernie", preprocessor=bounds).options.max_pixels == 6177 * 28 * 28


def test_fit_size_equals_transformers_everywhere():
    rng = random.Random(0)
    for _ in range(3000):
        height, width = (int(2 ** rng.uniform(0, 12)) for _ in range(2))
        low = int(2 ** rng.uniform(0, 14))
        options = ImageOptions(min_pixels=low, max_pixels=low * rng.randint(1, 1000))
        if max(height, width) > 200 * min(height, width):
            with pytest.raises(MediaError, match="200 times"):
                fit_size(height, width, options)
            continue
        theirs = smart_resize(height, width, 28, options.min_pixels, options.max_pixels)
        assert fit_size(height, width, options) == theirs


@pytest.mark.parametrize(("size", "grid"), [((1, 300), (400, 2)), ((7000, 30), (2, 400))])
def test_ernie_clamps_an_aspect_over_200_as_fastdeploy(size, grid, make_processor, noise, limits):
    processor = make_processor("ernie")
    made = processor.process(processor.decode(noise(*size), limits), {})
    assert made.grid_thw == (1, *grid)
    assert made.tensors["pixels"].shape == (grid[0] * grid[1], 588)


def test_key_depends_on_content_shape_form_and_options(make_processor, noise, limits, encode):
    def key(source, **options):
        processor = make_processor(options=options)
        return processor.process(processor.decode(source, limits), {}).key

    image = noise(60, 40)
    assert key(image) == key(image.copy())
    others = [
        key(noise(60, 40, seed=1)),
        key(image.transpose(2)),
        key(image.resize((40, 60))),
        key(image, max_pixels=28 * 28 * 4),
        key(encode(image)),
        key(encode(image, "BMP")),
    ]
    assert len({key(image), *others}) == 7


def test_cve_2025_46722_key_never_ignores_the_shape(make_processor, limits):
    processor = make_processor()
    values = torch.zeros(20 * 30 * 3, dtype=torch.uint8)
    wide = processor.decode(values.reshape(20, 30, 3).numpy(), limits)
    tall = processor.decode(values.reshape(30, 20, 3).numpy(), limits)
    assert wide.digest != tall.digest


def test_item_options_are_refused(make_processor, noise, limits):
    processor = make_processor()
    with pytest.raises(MediaError, match="'fps'"):
        processor.process(processor.decode(noise(30, 30), limits), {"fps": 2})
