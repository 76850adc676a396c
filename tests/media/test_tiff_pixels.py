"""Pictures in TIFF files of every kind of number, layout and extra sample. Right values follow from
how the files are made (tiff_files.py writes them by the specification)."""

import io
import struct

import numpy as np
import pytest
from mmdeploy_llm_processors.tiff.splitter import TIFFSplitter
from PIL import Image

from mmdeploy_llm.errors import MediaError, UnsupportedMediaError
from mmdeploy_llm.hooks import Checkpoint, MediaLimits
from mmdeploy_llm.media import decode_image
from tests.media.tiff_files import CMYK, DEFLATE, GRAY, PACKBITS, PALETTE, RGB, page, pages, tiff

RANDOM = np.random.default_rng(0)
HEIGHT, WIDTH = 37, 45
LAYOUTS = [
    pytest.param(
        {"order": order, "compression": squeezed} | blocks, id=f"{order}{squeezed}{blocks}"
    )
    for order in "<>"
    for squeezed in (1, DEFLATE, PACKBITS)
    for blocks in ({"rows": 7}, {"tile": (16, 16)})
]


def shown(blob):
    return np.asarray(decode_image(blob).image)


def notes_of(source):
    return decode_image(source).notes


def gray(found):
    assert (found == found[..., :1]).all(), "it is gray"
    return found[..., 0]


def close(found, wanted):
    return np.abs(found.astype(float) - wanted).max() <= 0.5 + 1e-6


def between(dtype, low=None, high=None):
    limits = np.iinfo(dtype)
    low, high = limits.min if low is None else low, limits.max if high is None else high
    values = RANDOM.integers(low, high, (HEIGHT, WIDTH), dtype, endpoint=True)
    values[0, :2] = low, high
    return values


def stretched(values):
    values = values.astype(float)
    return (values - values.min()) / (values.max() - values.min()) * 255


# Numbers

WHOLE = [(np.uint8, 8), (np.uint16, 16), (np.uint16, 12)]


@pytest.mark.few_in_ci(8)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("white", ["one", "zero"])
@pytest.mark.parametrize(("dtype", "bits"), WHOLE)
def test_whole_numbers_are_shares_of_their_largest(dtype, bits, white, layout):
    values = between(dtype, 0, 2**bits - 1)
    found = gray(shown(tiff(values, 1 if white == "one" else 0, bits=bits, **layout)))
    wanted = values.astype(float) * 255 / (2**bits - 1)
    assert close(found, wanted if white == "one" else 255 - wanted)
    assert notes_of(tiff(values, bits=bits, **layout)) == ()


@pytest.mark.few_in_ci(8)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.uint32, np.float32])
def test_numbers_without_a_white_are_shown_from_least_to_greatest(dtype, layout):
    if dtype == np.float32:
        values = (RANDOM.standard_normal((HEIGHT, WIDTH)) * 1000).astype(dtype)
    else:
        values = between(dtype)
    blob = tiff(values, **layout)
    assert close(gray(shown(blob)), stretched(values))
    [note] = notes_of(blob)
    assert note == (
        f"the image's numbers from {values.min():g} to {values.max():g} were shown from black to "
        "white, as it names no white"
    )


def test_numbers_are_kept_apart_where_they_are_large():
    values = np.array([[2**31 - 2, 2**31 + 2, 2**31]], np.uint32)
    assert gray(shown(tiff(values))).tolist() == [[0, 255, 128]]


@pytest.mark.parametrize("most", [0.25, 1.0, 1.0005])
def test_fractions_are_shares_of_white(most):
    values = np.linspace(0, most, HEIGHT * WIDTH, dtype=np.float32).reshape(HEIGHT, WIDTH)
    assert close(gray(shown(tiff(values))), np.minimum(values, 1) * 255.0)
    assert notes_of(tiff(values)) == ()


def test_one_fraction_above_one_is_no_black_picture():
    values = np.linspace(0, 1, HEIGHT * WIDTH, dtype=np.float32).reshape(HEIGHT, WIDTH)
    values[3, 4] = 1.5
    assert close(gray(shown(tiff(values))), values * 170.0)
    assert "from 0 to 1.5" in notes_of(tiff(values))[0]


@pytest.mark.parametrize("nothing", [np.nan, np.inf, -9999.0])
def test_pixels_without_a_number_are_black_and_counted(nothing):
    values = np.linspace(100, 300, HEIGHT * WIDTH, dtype=np.float32).reshape(HEIGHT, WIDTH)
    wanted = stretched(values)
    values[5, 5:8], wanted[5, 5:8] = nothing, 0
    tags = {42113: (2, b"-9999\0")}  # GDAL_NODATA
    blob = tiff(values, tags=tags)
    assert close(gray(shown(blob)), wanted)
    assert notes_of(blob)[1] == "3 pixels of the image have no number and were shown as black"


def test_numbers_that_are_all_the_same():
    for values in (np.full((4, 4), -3, np.int16), np.full((4, 4), np.nan, np.float32)):
        assert not shown(tiff(values)).any()
        assert len(notes_of(tiff(values))) == 1


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_colours_in_fractions_are_refused_with_words(bits):
    values = np.zeros((4, 4, 3), f"f{bits // 8}")
    with pytest.raises(UnsupportedMediaError, match="in a form that Pillow does not read"):
        shown(tiff(values))


def test_an_image_made_in_memory_says_how_it_was_read():
    numbers = np.array([[0, 100, 255]], np.int32)
    assert gray(shown(Image.fromarray(numbers))).tolist() == numbers.tolist()
    assert notes_of(Image.fromarray(numbers)) == (
        "an image of 32-bit numbers up to 255 was read as one of 8 bits",
    )
    found = gray(shown(Image.fromarray(numbers - 1000)))
    assert found.tolist() == [[0, 100, 255]]


# Layouts


@pytest.mark.few_in_ci(10)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_planar", [False, True])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_colours_in_planes_and_tiles(dtype, is_planar, layout):
    values = RANDOM.integers(0, np.iinfo(dtype).max, (HEIGHT, WIDTH, 3), dtype, endpoint=True)
    found = shown(tiff(values, planar=is_planar, **layout))
    wanted = values if dtype == np.uint8 else values >> 8
    assert np.abs(found.astype(int) - wanted).max() <= (dtype == np.uint16)


@pytest.mark.parametrize("order", ["<", ">"])
def test_an_image_that_the_caller_opened_is_read_alike(order, tmp_path):
    values = RANDOM.integers(0, 65535, (HEIGHT, WIDTH, 3), np.uint16)
    (tmp_path / "planes.tif").write_bytes(blob := tiff(values, planar=True, order=order))
    for file in (io.BytesIO(blob), tmp_path / "planes.tif"):
        with Image.open(file) as opened:
            assert np.abs(shown(opened).astype(int) - (values >> 8)).max() <= 1
            assert opened.tile, "the caller's image is not changed"
    sizes = [(4, 6), (7, 3)]
    made = pages([page(np.full((*size, 3), 99, np.uint8)) for size in sizes])
    opened = Image.open(io.BytesIO(made))
    opened.seek(1)
    assert shown(opened).shape == (7, 3, 3)


@pytest.mark.parametrize("order", ["<", ">"])
def test_pages_of_different_sizes_and_kinds(order):
    pictures = [
        np.full((5, 9, 3), 40, np.uint8),
        np.full((7, 4), 0, np.uint16),
        np.array([[-5, 5]], np.int16),
    ]
    made = pages(
        [
            page(pictures[0], order=order),
            page(pictures[1], 0, order=order),
            page(pictures[2], order=order),
        ],
        order,
    )
    parts = TIFFSplitter(Checkpoint, {}).split(made, {}, MediaLimits())
    found = [decode_image(part.source) for part in parts]
    assert [item.size for item in found] == [(9, 5), (4, 7), (2, 1)]
    assert [item.image.getpixel((0, 0))[0] for item in found] == [40, 255, 0]
    turned = TIFFSplitter(Checkpoint, {}).split(made, {"turn": 90}, MediaLimits())[2].source
    assert decode_image(turned).size == (1, 2)
    assert decode_image(turned).notes == found[2].notes != ()


# Palettes and extra samples


@pytest.mark.parametrize("most", [65535, 255])
@pytest.mark.parametrize("bits", [1, 4, 8])
def test_palettes_of_16_bits_and_those_that_hold_8_by_mistake(bits, most):
    count = 2**bits
    colours = RANDOM.integers(0, most, (3, count), endpoint=True)
    colours[0, 0] = most
    indexes = RANDOM.integers(0, count, (HEIGHT, WIDTH), np.uint8)
    found = shown(tiff(indexes, PALETTE, bits=bits, tags={320: (3, [*colours.ravel()])}))
    wanted = colours.T[indexes] * 255 / most
    assert np.abs(found - wanted).max() <= 1


EXTRA = {"nothing": 0, "premultiplied": 1, "alpha": 2}


@pytest.mark.parametrize("is_planar", [False, True])
@pytest.mark.parametrize("extra", EXTRA)
@pytest.mark.parametrize(("kind", "dtype"), [(RGB, np.uint8), (RGB, np.uint16), (GRAY, np.uint8)])
def test_extra_samples(kind, dtype, extra, is_planar):
    most = np.iinfo(dtype).max
    samples = 3 if kind == RGB else 1
    alpha = RANDOM.integers(0, most, (HEIGHT, WIDTH, 1), dtype, endpoint=True)
    colours = RANDOM.integers(0, most, (HEIGHT, WIDTH, samples), dtype, endpoint=True)
    share = alpha / most
    if extra == "premultiplied":
        colours = (colours * share).astype(dtype)
    wanted = {
        "nothing": colours / most,
        "premultiplied": colours / most + 1 - share,
        "alpha": colours / most * share + 1 - share,
    }[extra]
    values = np.concatenate([colours, alpha], axis=-1)
    blob = tiff(values, kind, planar=is_planar, tags={338: (3, [EXTRA[extra]])})
    if kind == GRAY and is_planar and extra != "nothing":  # Pillow leaves out the alpha
        with pytest.raises(UnsupportedMediaError, match="in a form that Pillow does not read"):
            shown(blob)
        return
    gap = np.abs(shown(blob) - wanted * 255)
    assert gap.max() <= (3 if extra == "premultiplied" else 1.5 if dtype == np.uint8 else 2)


@pytest.mark.parametrize("layout", [{}, {"planar": True}, {"compression": DEFLATE, "planar": True}])
@pytest.mark.parametrize("num_extra", [0, 1])
def test_inks_with_an_extra_sample(num_extra, layout):
    values = RANDOM.integers(0, 255, (HEIGHT, WIDTH, 4 + num_extra), np.uint8)
    values[..., 3] = 0
    tags = {338: (3, [0])} if num_extra else {}
    found = shown(tiff(values, CMYK, tags=tags, **layout))
    assert (found == 255 - values[..., :3]).all()


@pytest.mark.parametrize("compression", [1, DEFLATE])
def test_subsampled_colours_that_are_not_compressed(compression):
    """Blocks of 2 x 2 pixels: four Y, one Cb, one Cr (TIFF 6.0, section 21)."""
    rows, columns = 8, 12
    blocks = RANDOM.integers(60, 180, (rows // 2, columns // 2, 6), np.uint8)
    tags, data, places = page(blocks.reshape(rows // 2, -1, 1), compression=compression)
    tags |= {
        **{256: (4, [columns]), 257: (4, [rows]), 278: (4, [rows]), 277: (3, [3])},
        **{258: (3, [8] * 3), 339: (3, [1] * 3), 262: (3, [6]), 530: (3, [2, 2])},
    }
    y = blocks[..., :4].reshape(rows // 2, columns // 2, 2, 2).swapaxes(1, 2).reshape(rows, -1)
    cb, cr = (blocks[..., n].repeat(2, 0).repeat(2, 1).astype(float) - 128 for n in (4, 5))
    wanted = np.stack([y + 1.402 * cr, y - 0.344 * cb - 0.714 * cr, y + 1.772 * cb], axis=-1)
    found = shown(pages([(tags, data, places)]))
    assert np.abs(found - np.clip(wanted, 0, 255)).max() <= 2


# Damage

PICTURE = np.add.outer(np.arange(64), np.arange(96)).astype(np.uint8)[:, :, None].repeat(3, 2)


def damaged(blob, tag, change):
    """Returns the file with other numbers in a list of places or lengths."""
    values = list(Image.open(io.BytesIO(blob)).tag_v2[tag])
    form = f"<{len(values)}I"
    written = struct.pack(form, *values)
    assert blob.count(written) == 1
    values[len(values) // 2] = change(values[len(values) // 2])
    return blob.replace(written, struct.pack(form, *values))


@pytest.mark.parametrize("compression", [1, DEFLATE, PACKBITS])
@pytest.mark.parametrize("is_tiled", [False, True])
@pytest.mark.parametrize(
    ("is_place", "change"),
    [(True, lambda at: 0), (True, lambda at: at + 10**6), (False, lambda size: 0),
     (False, lambda size: size // 2)],
    ids=["no place", "place outside", "no length", "half the length"],
)  # fmt: skip
def test_missing_strips_and_tiles_fail(compression, is_tiled, is_place, change):
    blocks = {"tile": (16, 32)} if is_tiled else {"rows": 8}
    blob = tiff(PICTURE, compression=compression, **blocks)
    assert (shown(blob) == PICTURE).all()
    tag = (324 if is_tiled else 273) if is_place else (325 if is_tiled else 279)
    with pytest.raises(MediaError, match=r"damaged|corrupt|truncated"):
        shown(damaged(blob, tag, change))


def test_strips_that_are_not_listed_fail():
    tags, blocks, places = page(PICTURE, rows=8)
    assert (shown(pages([(tags, blocks, places)])) == PICTURE).all()
    with pytest.raises(MediaError, match="damaged"):
        shown(pages([(tags, blocks[:-2], places)]))


def test_tiles_that_a_program_for_maps_left_out_fail():
    for compression in (1, DEFLATE):
        with pytest.raises(MediaError, match="damaged"):
            shown(tiff(PICTURE, tile=(16, 32), sparse=(3,), compression=compression))


@pytest.mark.parametrize("place", [0.2, 0.5, 0.9])
def test_flipped_bits_of_a_compressed_strip_fail(place):
    blob = bytearray(tiff(PICTURE, compression=DEFLATE))
    [at], [size] = (Image.open(io.BytesIO(blob)).tag_v2[tag] for tag in (273, 279))
    blob[at + int(size * place)] ^= 4
    with pytest.raises(MediaError, match="damaged"):
        shown(bytes(blob))


def test_a_photo_within_a_tiff_that_is_cut_off_fails():
    file = io.BytesIO()
    noise = Image.fromarray(RANDOM.integers(0, 255, (64, 96, 3), np.uint8))
    noise.save(file, "TIFF", compression="jpeg", strip_size=96 * 3 * 16)
    blob, tags = bytearray(file.getvalue()), Image.open(file).tag_v2
    assert shown(bytes(blob)).shape == (64, 96, 3)
    start, size = tags[273][2], tags[279][2]
    blob[start + size // 2 : start + size] = bytes(size - size // 2)
    with pytest.raises(MediaError, match="damaged"):
        shown(bytes(blob))


def test_a_lone_strip_without_a_length_is_read():
    """Old programs left it out: what is there is the picture."""
    made = tiff(PICTURE)
    [size] = Image.open(io.BytesIO(made)).tag_v2[279]
    entry = struct.pack("<HHII", 279, 4, 1, size)
    assert made.count(entry) == 1
    assert (shown(made.replace(entry, struct.pack("<HHII", 279, 4, 1, 0))) == PICTURE).all()


@pytest.mark.parametrize(
    ("blob", "name"),
    [
        (bytes(128) + b"DICM" + bytes(400), "a DICOM image"),
        (b"SIMPLE  =                    T".ljust(2880), "a FITS image"),
        (bytes(344) + b"n+1\0" + bytes(200), "a NIfTI volume"),
    ],
    ids=["DICOM", "FITS", "NIfTI"],
)
def test_formats_that_need_a_window_are_refused_by_name(blob, name):
    with pytest.raises(UnsupportedMediaError, match=name):
        shown(blob)
