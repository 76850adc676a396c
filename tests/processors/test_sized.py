"""Bases of processors whose items have a text that follows from their size alone."""

import io
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from mmdeploy_llm_processors.sized import PictureProcessor, Prepared
from mmdeploy_llm_processors.sized.options import engine_settings, item_settings
from PIL import Image

from mmdeploy_llm.errors import ConfigError, MediaError
from mmdeploy_llm.hooks import Checkpoint, MediaLimits, MediaProcessorSpec
from mmdeploy_llm.media import ImageHeader, PatchOptions, patchify, tile_grid, tiles
from mmdeploy_llm.testing import MediaProcessorConformance

SIDE, PATCH = 28, 14


class Tiled(PictureProcessor):
    """Images of up to max_tiles square tiles of 4 tokens, between marks."""

    token = "<image>"
    markers = ("<image>",)
    defaults = MappingProxyType(
        {"max_tiles": 6, "sharp": False, "weights": (1.0, 2.0), "name": "a", "scale": 0.5}
    )
    item_options = ("max_tiles",)
    bounds = ("max_tiles",)

    def prepare(self, content, settings):
        grid = tile_grid(content.size, SIDE, max_tiles=settings["max_tiles"])
        options = PatchOptions(patch_size=PATCH)
        rows = np.concatenate([patchify(each, options) for each in tiles(content, grid, SIDE)])
        text = f"<img>{self.token * len(rows)}</img>"
        return Prepared(tensors={"pixels": rows}, text=text, grid=(len(rows) // 4, 2, 2))


class Kernelled(Tiled):
    """The same tiles, by kernels where there are some."""

    def prepare(self, content, settings):
        grid = tile_grid(content.size, SIDE, max_tiles=settings["max_tiles"])
        options = PatchOptions(patch_size=PATCH)
        rows = [self.patchify(each, options) for each in tiles(content, grid, SIDE)]
        count = sum(map(len, rows))
        return Prepared(tensors={"pixels": np.concatenate(rows)}, text=self.token * count)


class Grid(PictureProcessor):
    """Images that are one grid of patches of any size."""

    token = "<image>"
    markers = ("<image>",)

    def prepare(self, content, settings):
        width, height = (max(1, round(side / PATCH)) * PATCH for side in content.size)
        rows = patchify(np.asarray(content.resize((width, height))), PatchOptions(patch_size=PATCH))
        return Prepared(tensors={"pixels": rows}, text=self.token * len(rows))


SPEC = MediaProcessorSpec(name="tiled", kind="image", factory=f"{__name__}:Tiled")


def checkpoint():
    return Checkpoint(folder=Path("."), config=None)


def tiled(**options):
    return Tiled(checkpoint(), options)


def png(width, height):
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(buffer, "PNG")
    return buffer.getvalue()


class TestTiled(MediaProcessorConformance):
    spec = SPEC
    other_options = MappingProxyType({"image_max_tiles": 2})
    item_options = MappingProxyType({"max_tiles": 1})


def test_an_item():
    processor = tiled()
    made = processor.process(processor.decode(png(300, 100), MediaLimits()), {})
    assert made.num_tokens == 16
    assert made.grid_thw == (4, 2, 2)
    assert made.prompt_text == f"<img>{'<image>' * 16}</img>"
    assert made.tensors["pixels"].shape == (16, 3 * PATCH**2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tile": 2}, "no image option 'max_tile'; did you mean 'max_tiles'"),
        ({"max_tiles": 0}, "max_tiles must be a whole number from 1, got 0"),
        ({"max_tiles": True}, "must be a whole number"),
        ({"sharp": 1}, "sharp must be True or False"),
        ({"weights": [1]}, "weights must be 2 numbers"),
        ({"weights": [1, float("nan")]}, "weights must be 2 numbers"),
        ({"name": 3}, "name must be a text"),
        ({"scale": "x"}, "scale must be a number"),
    ],
)
def test_wrong_options_of_an_engine(options, message):
    with pytest.raises(ConfigError, match=message):
        tiled(**options)


def test_options_of_other_kinds_are_left_to_them():
    assert tiled(video_fps=2, image_max_tiles=3).settings["max_tiles"] == 3
    assert tiled(weights=[3, 4]).settings["weights"] == (3, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tiles": 7}, "max_tiles = 7 is above the engine's 6; raise it"),
        ({"sharp": True}, "one prompt or image cannot set sharp; give it for all"),
        ({"max_tile": 2}, "an image of this model has no option 'max_tile'; did you mean"),
        ({"max_tiles": "x"}, "max_tiles must be a whole number from 1, got 'x'"),
    ],
)
def test_wrong_options_of_an_item(options, message):
    with pytest.raises(MediaError, match=message):
        tiled().count_tokens(ImageHeader(size=(100, 100)), options)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("size", [(600, 100), (100, 600), (28, 28), (3000, 2000), (1, 1)])
@pytest.mark.parametrize("tokens", [4, 10, 12, 17, 100])
def test_budgets_of_tiles(size, tokens):
    limited = tiled().with_budget(tokens)
    count = limited.count_tokens(ImageHeader(size=size), {})
    assert count <= tokens
    assert count <= tiled().count_tokens(ImageHeader(size=size), {})
    item = limited.decode(png(*size), MediaLimits())
    assert limited.process(item, {}).num_tokens == count
    assert limited.prompt_text(item, {}).count("<image>") == count


@pytest.mark.full
def test_a_budget_may_raise_the_number_of_tiles():
    header = ImageHeader(size=(3000, 1000))
    assert tiled().count_tokens(header, {}) == 16
    assert 16 < tiled().with_budget(80, may_raise=True).count_tokens(header, {}) <= 80
    assert tiled(max_tiles=2).with_budget(80, may_raise=True).count_tokens(header, {}) == 12
    with pytest.raises(ConfigError, match="image_tokens = 3 is below 4"):
        tiled().with_budget(3)


def test_options_of_an_item_within_a_budget():
    header = ImageHeader(size=(3000, 100))
    limited = tiled().with_budget(20)
    assert limited.count_tokens(header, {"max_tiles": 2}) == 12
    assert limited.count_tokens(header, {"max_tiles": 6}) <= 20


@pytest.mark.full
@pytest.mark.parametrize("size", [(2000, 1000), (1000, 2000), (20, 3000)])
def test_images_are_shrunk_where_no_option_bounds_them(size):
    processor = Grid(checkpoint(), {})
    limited = processor.with_budget(64)
    item = limited.decode(png(*size), MediaLimits())
    made = limited.process(item, {})
    assert made.num_tokens == limited.count_tokens(item, {})
    assert 32 < made.num_tokens <= 64
    assert made.key != processor.process(item, {}).key
    small = limited.decode(png(40, 40), MediaLimits())
    assert limited.process(small, {}).key == processor.process(small, {}).key


class Kernels:
    """Counts calls, and leaves the patches empty."""

    def __init__(self):
        self.num_calls = 0

    def patchify(self, pixels, table, out, **_):
        self.num_calls += 1
        out.zero_()


@pytest.mark.parametrize("tokens", [None, 12])
def test_kernels_are_used_within_a_budget_too(tokens):
    processor = Kernelled(checkpoint(), {})
    processor = processor if tokens is None else processor.with_budget(tokens)
    item, kernels = processor.decode(png(300, 100), MediaLimits()), Kernels()
    before = processor.process(item, {})
    processor.use_kernels(kernels)
    after = processor.process(item, {})
    assert kernels.num_calls == after.num_tokens // 4
    assert after.tensors["pixels"].shape == before.tensors["pixels"].shape
    assert not after.tensors["pixels"].any()


def test_embeddings():
    processor = tiled()
    made = processor.embedded(16, None, {"size": (300, 100)})
    assert (made.num_tokens, made.grid_thw, made.tensors) == (16, (4, 2, 2), {})
    assert made.prompt_text.count("<image>") == 16
    with pytest.raises(MediaError, match="'size' of image_embeds must be"):
        processor.embedded(16, None, {})
    with pytest.raises(MediaError, match="has 16 tokens in this model; give the image's own"):
        processor.embedded(15, None, {"size": (300, 100)})
    with pytest.raises(MediaError, match=r"the grid \(1, 4, 4\) of image_embeds is not that"):
        processor.embedded(16, (1, 4, 4), {"size": (300, 100)})


def test_a_default_of_no_type_is_a_mistake_of_the_author():
    class Wrong(Tiled):
        defaults = MappingProxyType({"nothing": None})

    with pytest.raises(TypeError, match="the default None is no bool"):
        Wrong(checkpoint(), {"nothing": 1})


@pytest.mark.parametrize(
    ("given", "bounds"),
    [
        ({}, (2, 6)),
        ({"max_tiles": 1}, (1, 1)),
        ({"min_tiles": 9}, (9, 9)),
        ({"min_tiles": 9, "max_tiles": 3}, (9, 3)),  # for the processor to refuse
    ],
    ids=str,
)
def test_a_default_bound_gives_way_to_a_given_one(given, bounds):
    found = engine_settings("image", {"min_tiles": 2, "max_tiles": 6}, given)
    assert (found["min_tiles"], found["max_tiles"]) == bounds


def test_a_bound_of_the_engine_gives_way_to_one_of_an_item_downwards():
    names, engine = ("min_tiles", "max_tiles"), {"min_tiles": 2, "max_tiles": 6}
    few = item_settings("image", engine, {"max_tiles": 1}, names, ("max_tiles",))
    assert (few["min_tiles"], few["max_tiles"]) == (1, 1)
    many = item_settings("image", engine, {"min_tiles": 9}, names, ("max_tiles",))
    assert many["max_tiles"] == 6
