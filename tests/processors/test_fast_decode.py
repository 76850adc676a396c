"""fast_decode: JPEG files at draft quality, close to the exact pixels, with equal token counts."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate

from mmdeploy_llm.errors import ConfigError, MediaError, MediaLimitError
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.media import resize_draft
from mmdeploy_llm.media.image.decode import ImageDecoder

SMALL = {"max_pixels": 28 * 28 * 64}


@pytest.fixture
def photo():
    """Draws smooth shapes with some grain, which JPEG compresses well."""

    def make(width, height, seed=0):
        rng = np.random.default_rng(seed)
        pixels = np.full((height, width, 3), 128, dtype=np.float32)
        for cell, weight in ((64, 70), (12, 25)):
            shape = (height // cell + 2, width // cell + 2, 3)
            coarse = Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8))
            layer = coarse.resize((width, height), Image.Resampling.BICUBIC)
            pixels += (np.asarray(layer, dtype=np.float32) / 127.5 - 1) * weight
        pixels += rng.normal(0, 4, (height, width, 1))
        return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))

    return make


@pytest.fixture
def both(make_processor, limits):
    """Decodes a source exactly and fast."""

    def make(source, family="qwen", **options):
        exact = make_processor(family, options=options)
        fast = make_processor(family, options={**options, "fast_decode": True})
        return [each.process(each.decode(source, limits), {}) for each in (exact, fast)]

    return make


def levels(one, other):
    """Returns the mean difference of patches in levels of 255 (all deviations are below 0.28)."""
    return (one.tensors["pixels"] - other.tensors["pixels"]).abs().mean().item() * 255 * 0.27


@pytest.mark.one_is_quick
@pytest.mark.parametrize("family", ["ernie", "qwen"])
@pytest.mark.parametrize("size", [(1000, 750), (751, 1003), (300, 2000), (449, 448), (97, 61)])
def test_pixels_are_close_and_counts_the_same(family, size, both, photo, encode):
    blob = encode(photo(*size), "JPEG", quality=90)
    exact, fast = both(blob, family, **SMALL)
    assert fast.grid_thw == exact.grid_thw
    assert fast.num_tokens == exact.num_tokens
    assert fast.tensors["pixels"].shape == exact.tensors["pixels"].shape
    assert levels(fast, exact) < 1.5
    assert fast.key != exact.key


def test_without_a_reduction_only_resizing_rounds_differently(both, photo, encode):
    exact, fast = both(encode(photo(600, 450), "JPEG"), **SMALL | {"max_pixels": 28 * 28 * 200})
    assert 0 < levels(fast, exact) < 0.05


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "shrunk"),
    [
        ((1792, 1792), (224, 224)),
        ((1791, 1792), (448, 448)),
        ((900, 448), (450, 224)),
        ((447, 900), (447, 900)),
        ((100, 100), (100, 100)),
    ],
)
def test_the_largest_reduction_that_is_not_below_the_target(size, shrunk, photo, encode):
    blob = encode(photo(*size), "JPEG")
    item = ImageDecoder().decode(blob, MediaLimits(), lambda height, width: (224, 224))
    assert item.image.size == shrunk
    assert item.size == item.draft_of == size


@pytest.mark.one_is_quick
@pytest.mark.parametrize("size", [(3000, 40), (640, 480), (1999, 1501), (57, 2100), (30, 30)])
def test_never_smaller_than_the_target(size, make_processor, limits, photo, encode):
    processor = make_processor(options={"fast_decode": True, **SMALL})
    item = processor.decode(encode(photo(*size), "JPEG"), limits)
    height, width = processor.target_size(*size[::-1])
    assert item.image.width >= min(width, size[0])
    assert item.image.height >= min(height, size[1])
    assert processor.count_tokens(item, {}) == height * width // 28**2


@pytest.mark.one_is_quick
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_respected(orientation, both, photo, encode):
    exif = Image.Exif()
    exif[0x0112] = orientation
    exact, fast = both(encode(photo(1100, 500), "JPEG", exif=exif), **SMALL)
    assert fast.grid_thw == exact.grid_thw
    assert levels(fast, exact) < 1.5


@pytest.mark.one_is_quick
@pytest.mark.parametrize("format", ["PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_other_formats_are_exact(format, both, photo, encode):
    exact, fast = both(encode(photo(900, 700), format), **SMALL)
    assert torch.equal(fast.tensors["pixels"], exact.tensors["pixels"])


def test_loaded_objects_are_exact_and_unchanged(both, photo, encode):
    blob = encode(photo(900, 700), "JPEG")
    for make in (lambda: Image.open(io.BytesIO(blob)), lambda: np.asarray(photo(900, 700))):
        source = make()
        exact, fast = both(source, **SMALL)
        assert torch.equal(fast.tensors["pixels"], exact.tensors["pixels"])
        assert np.array_equal(np.asarray(source), np.asarray(make()))


@pytest.mark.one_is_quick
@pytest.mark.parametrize("mode", ["L", "CMYK", "YCbCr"])
def test_other_colour_spaces(mode, both, photo, encode):
    exact, fast = both(encode(photo(900, 700).convert(mode), "JPEG"), **SMALL)
    assert levels(fast, exact) < 1.5


@pytest.mark.one_is_quick
@pytest.mark.parametrize("resample", range(6))
def test_every_filter(resample, both, photo, encode):
    exact, fast = both(encode(photo(520, 400), "JPEG"), resample=resample, **SMALL)
    assert fast.grid_thw == exact.grid_thw
    assert levels(fast, exact) < 3  # nearest and box keep more grain than a reduction does


def test_progressive_files(both, photo, encode):
    exact, fast = both(encode(photo(900, 700), "JPEG", progressive=True), **SMALL)
    assert levels(fast, exact) < 1.5


def test_limits_and_faults_stay(make_processor, photo, encode):
    processor = make_processor(options={"fast_decode": True, **SMALL})
    blob = encode(photo(900, 700), "JPEG")
    with pytest.raises(MediaLimitError, match="630000 pixels"):
        processor.decode(blob, MediaLimits(max_pixels=600_000))
    for cut in (30, len(blob) // 2, len(blob) - 200):
        with pytest.raises(MediaError):
            processor.decode(blob[:cut], MediaLimits())
    with pytest.raises(MediaError, match="200 times"):
        processor.decode(encode(photo(3, 900), "JPEG"), MediaLimits())


def test_the_option_is_the_users(make_processor):
    assert make_processor(options={"image_fast_decode": True}).options.fast_decode
    assert not make_processor(preprocessor={"fast_decode": True}).options.fast_decode
    with pytest.raises(ConfigError, match="True or False"):
        make_processor(options={"fast_decode": 1})
    with pytest.raises(ConfigError, match="do_resize is off"):
        make_processor(options={"fast_decode": True, "do_resize": False})


@pytest.mark.one_is_quick
@pytest.mark.parametrize("size", [(1000, 750), (751, 1003), (31, 640)])
@pytest.mark.parametrize("name", ["bilinear", "bicubic", "lanczos"])
def test_resizing_is_that_of_torch_where_torch_has_the_filter(size, name, photo):
    image = photo(*size)
    resample = Image.Resampling[name.upper()]
    made = resize_draft(image, 168, 224, resample)
    if name == "lanczos":
        wanted = np.asarray(image.resize((224, 168), resample))
    else:
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
        resized = interpolate(pixels, (168, 224), mode=name, antialias=True)
        wanted = resized[0].permute(1, 2, 0).numpy()
    assert np.array_equal(made, wanted)
