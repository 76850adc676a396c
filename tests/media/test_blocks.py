"""The functions of mmdeploy_llm.media, as a processor of another package calls them."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from mmdeploy_llm.errors import MediaError, MediaLimitError, UnsupportedMediaError
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.media import (
    PatchOptions,
    decode_image,
    normalise,
    patchify,
    read_beneath,
    resize,
    tile_grid,
    tiles,
)
from mmdeploy_llm.testing.media.samples import pixels


def picture(width=56, height=28, seed=0):
    return Image.fromarray(pixels(height, width, seed=seed))


def png(image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def test_one_image_is_decoded():
    image = picture()
    found = decode_image(png(image))
    assert found.size == (56, 28)
    assert found.image.tobytes() == image.tobytes()
    with pytest.raises(MediaLimitError, match="1568 pixels, 100 are allowed"):
        decode_image(png(image), MediaLimits(max_pixels=100))


def test_one_image_is_decoded_in_a_process_that_ends():
    image = picture()
    found = decode_image(png(image), MediaLimits(isolation="process"))
    assert found.image.tobytes() == image.tobytes()
    assert found.digest == decode_image(png(image)).digest


def test_arrays_and_tensors_of_unusual_memory():
    """Values in the other byte order; a conjugated tensor is refused as complex ones are."""
    values = np.array([[0, 257], [65535, 128]], np.uint16)
    swapped = decode_image(values.astype(">u2")).image
    assert swapped.tobytes() == decode_image(values).image.tobytes()
    floats = np.array([[0, 0.5]], ">f4")
    assert (
        decode_image(floats).image.tobytes() == decode_image(floats.astype("<f4")).image.tobytes()
    )
    complex_numbers = torch.ones(3, 4, 4, dtype=torch.complex64)
    for tensor in (complex_numbers, complex_numbers.conj()):
        with pytest.raises(UnsupportedMediaError, match="dtype complex64 is not accepted"):
            decode_image(tensor)
    negative = complex_numbers.conj().imag  # a view whose values are negated when they are read
    assert decode_image(negative).image.getpixel((0, 0)) == (0, 0, 0)


def test_patch_rows_and_planes_have_the_same_values():
    array = np.asarray(picture())
    options = PatchOptions(patch_size=14, image_mean=(0.5, 0.4, 0.3), image_std=(0.2, 0.3, 0.5))
    planes = normalise(array, options)
    wanted = (array.transpose(2, 0, 1) / 255 - np.array([0.5, 0.4, 0.3])[:, None, None]) / np.array(
        [0.2, 0.3, 0.5]
    )[:, None, None]
    np.testing.assert_allclose(planes, wanted, atol=1e-6)
    rows = patchify(array, options)
    assert rows.shape == (8, 3 * 14 * 14)
    assert (rows[5].reshape(3, 14, 14) == planes[:, 14:28, 14:28]).all()


def test_patches_of_a_token_follow_each_other():
    array = np.asarray(picture())
    plain = patchify(array, PatchOptions(patch_size=7))
    merged = patchify(array, PatchOptions(patch_size=7, merge_size=2))
    assert (merged[:4] == plain[[0, 1, 8, 9]]).all()


def test_pixels_that_no_patches_fill_are_refused():
    with pytest.raises(ValueError, match=r"30 x 56 pixels are no multiple of .* 28; resize them"):
        patchify(np.zeros((30, 56, 3), np.uint8), PatchOptions(patch_size=14, merge_size=2))


def test_tiles_are_the_parts_of_the_resized_image():
    image = picture(600, 300)
    grid = tile_grid(image.size, 100, max_tiles=6)
    assert grid == (2, 1)
    left, right, thumbnail = tiles(image, grid, 100)
    whole = resize(image, 100, 200)
    assert (np.concatenate([left, right], 1) == whole).all()
    assert (thumbnail == resize(image, 100, 100)).all()
    assert len(list(tiles(image, grid, 100, has_thumbnail=False))) == 2
    assert len(list(tiles(image, (1, 1), 100))) == 1


def test_files_beneath_a_folder(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "a").write_bytes(b"abc")
    (tmp_path / "secret").write_bytes(b"no")
    (root / "link").symlink_to(tmp_path / "secret")
    limits = MediaLimits(allowed_root=root, max_bytes=3)
    assert read_beneath(root / "a", limits) == b"abc"
    for name in ("link", "../secret"):
        with pytest.raises(MediaError, match=r"the file '.*' is outside the folder"):
            read_beneath(str(root / name), limits)
    with pytest.raises(MediaLimitError, match="page 3 has 3 bytes, 2 are allowed"):
        read_beneath(root / "a", MediaLimits(max_bytes=2), name="page 3")
    assert read_beneath(root / "link", MediaLimits()) == b"no"
    with pytest.raises(MediaError, match=r"'~/gone.jpg' does not exist; ~ is not read"):
        read_beneath("~/gone.jpg", MediaLimits())
