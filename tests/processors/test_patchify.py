"""Patch rows made by the CPU kernels equal those made without them, bit for bit."""

import numpy as np
import pytest
from mmdeploy_llm_processors.image.options import ImageOptions
from mmdeploy_llm_processors.image.processor import ImageProcessor

from mmdeploy_llm import LLM
from mmdeploy_llm.media import Patchifier


@pytest.mark.one_is_quick
@pytest.mark.parametrize("patch_size", [7, 14, 16])
@pytest.mark.parametrize("merge_size", [1, 2, 3])
@pytest.mark.parametrize(("num_frames", "given"), [(1, 1), (2, 1), (2, 2), (3, 1), (3, 3)])
def test_equal(kernels, patch_size, merge_size, num_frames, given):
    options = ImageOptions(
        min_pixels=1,
        max_pixels=10**6,
        patch_size=patch_size,
        merge_size=merge_size,
        temporal_patch_size=num_frames,
        image_std=(0.2, 0.3, 0.4),
    )
    rng = np.random.RandomState(5)
    height, width = 2 * options.factor, 3 * options.factor
    frames = list(rng.randint(0, 256, (given, height, width, 3), dtype=np.uint8))
    frames[0] = np.asfortranarray(frames[0])  # kernels accept any layout
    plain, fast = Patchifier(options), Patchifier(options)
    fast.use_kernels(kernels)
    shape = (height * width // patch_size**2, 3 * num_frames * patch_size**2)
    expected, found = np.full((2, *shape), np.nan, dtype=np.float32)
    plain.fill(frames, expected)
    fast.fill(frames, found)
    assert np.array_equal(found, expected)
    if given == 1:
        assert np.array_equal(fast.rows(frames[0]), expected)


@pytest.mark.parametrize("native_kernels", [None, False])
def test_an_engine_hands_its_kernels_over(kernels, monkeypatch, native_kernels):
    handed = []
    monkeypatch.setattr(ImageProcessor, "use_kernels", lambda _, given: handed.append(given))
    with LLM(model="shapes-vl", device="cpu", native_kernels=native_kernels, use_warmup=False):
        assert bool(handed) == (native_kernels is None)
