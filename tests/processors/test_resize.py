"""Images resized by the CPU kernels equal those resized by Pillow, bit for bit."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import PIL
import pytest
from mmdeploy_llm_plugins.qwen.image import QwenImageProcessor
from PIL import Image

from mmdeploy_llm.hooks import Checkpoint, MediaLimits
from mmdeploy_llm.media import resize

SIZES = (  # (width, height) before and after
    ((97, 61), (31, 23)),
    ((61, 97), (200, 311)),  # larger
    ((640, 40), (224, 224)),  # smaller across, larger down
    ((1, 1), (28, 28)),
    ((1, 700), (28, 56)),
    ((1003, 17), (1, 1)),
    ((33, 47), (33, 20)),  # one direction alone, in which Pillow skips the other
    ((47, 33), (20, 33)),
    ((1000, 750), (112, 84)),
    ((100, 300), (101, 299)),  # Pillow 13 resizes down first
    ((300, 200), (310, 20)),
    ((100, 100), (120, 90)),
    ((22, 90), (23, 41)),
    ((64, 64), (31, 63)),
    ((60, 100), (40, 60)),  # exactly twice as many pixels less: across first
    ((60, 100), (40, 59)),
    ((102, 76), (61, 33)),
    ((40, 90), (60, 120)),
)


def picture(size, seed=0, *, is_flat=False):
    rng = np.random.default_rng(seed)
    shape = (size[1], size[0], 3)
    # Black and white overshoot at edges, where sums are clipped.
    values = rng.integers(0, 2, shape) * 255 if is_flat else rng.integers(0, 256, shape)
    return Image.fromarray(values.astype(np.uint8))


@pytest.mark.one_is_quick
@pytest.mark.parametrize("resample", [Image.Resampling.BILINEAR, Image.Resampling.BICUBIC])
@pytest.mark.parametrize(("before", "after"), SIZES)
@pytest.mark.parametrize("is_flat", [False, True])
def test_equal(kernels, resample, before, after, is_flat):
    image = picture(before, is_flat=is_flat)
    expected = np.asarray(image.resize(after, resample=resample))
    assert np.array_equal(resize(image, after[1], after[0], resample, kernels), expected)


def test_equal_at_random_sizes(kernels):
    rng = np.random.default_rng(1)
    for seed in range(100):
        before, after = rng.integers(15, 400, 2).tolist(), rng.integers(15, 300, 2).tolist()
        image, resample = picture(before, seed), int(rng.integers(2, 4))
        expected = np.asarray(image.resize(after, resample=Image.Resampling(resample)))
        found = resize(image, after[1], after[0], resample, kernels)
        assert np.array_equal(found, expected), (before, after, resample)


def test_other_filters_are_pillows(kernels):
    image, lanczos = picture((90, 70)), Image.Resampling.LANCZOS
    expected = np.asarray(image.resize((28, 28), resample=lanczos))
    assert np.array_equal(resize(image, 28, 28, lanczos, kernels), expected)


def test_narrow_registers_are_no_faster(kernels, monkeypatch):
    monkeypatch.setattr(kernels, "can_resize", False)
    monkeypatch.setattr(type(kernels), "resize", None)
    image = picture((300, 200))
    expected = np.asarray(image.resize((112, 84), resample=Image.Resampling.BICUBIC))
    assert np.array_equal(resize(image, 84, 112, kernels=kernels), expected)


def test_an_unknown_pillow_resizes_by_itself(kernels, monkeypatch):
    monkeypatch.setattr(PIL, "__version__", "99.0.0")
    image = picture((300, 200))
    monkeypatch.setattr(type(kernels), "resize", None)
    expected = np.asarray(image.resize((112, 84), resample=Image.Resampling.BICUBIC))
    assert np.array_equal(resize(image, 84, 112, kernels=kernels), expected)


def test_an_older_pillow_resizes_across_first(kernels, monkeypatch):
    monkeypatch.setattr(PIL, "__version__", "12.1.0")
    image = picture((300, 200))
    between = image.resize((310, 200), resample=Image.Resampling.BICUBIC)
    expected = np.asarray(between.resize((310, 20), resample=Image.Resampling.BICUBIC))
    assert np.array_equal(resize(image, 20, 310, kernels=kernels), expected)


def test_a_processor_resizes_with_its_kernels(kernels):
    config = SimpleNamespace(vision_config=None)
    plain, fast = (
        QwenImageProcessor(Checkpoint(folder=Path("."), config=config, preprocessor={}), {})
        for _ in range(2)
    )
    calls = []

    class Counting:
        can_resize = True

        def resize(self, *args, **options):
            calls.append(args)
            kernels.resize(*args, **options)

        def patchify(self, *args, **options):
            kernels.patchify(*args, **options)

    fast.use_kernels(Counting())
    items = [one.decode(picture((333, 217)), MediaLimits()) for one in (plain, fast)]
    expected, found = (
        one.process(item, {}).tensors["pixels"]
        for one, item in zip((plain, fast), items, strict=True)
    )
    assert found.equal(expected)
    assert len(calls) == 1
