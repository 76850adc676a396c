"""Image processors and feature extractors of transformers as media processors."""

import json
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import numpy as np
import pytest
import torch
import transformers
from mmdeploy_llm_processors.from_transformers import (
    OneSizeImages,
    TransformersImages,
    TransformersSounds,
)
from mmdeploy_llm_processors.from_transformers.shapes import longest_shape, shapes_told
from PIL import Image

from mmdeploy_llm.errors import (
    CheckpointError,
    ConfigError,
    MediaError,
    MediaLimitError,
    UnsupportedMediaError,
)
from mmdeploy_llm.hooks import Checkpoint, MediaLimits, MediaProcessorSpec
from mmdeploy_llm.media import ImageHeader
from mmdeploy_llm.testing import MediaProcessorConformance
from mmdeploy_llm.testing.media.samples.pictures import pixels

SIDE = 56
TILES = {"size": {"height": SIDE, "width": SIDE}, "max_patches": 6, "image_mean": [0.5, 0.4, 0.3]}
SQUARES = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
SOUNDS = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 8}


class Tiles(TransformersImages):
    """Tiles of 4 tokens, between marks, as in InternVL."""

    token = "<ctx>"
    markers = ("<ctx>",)
    source = "GotOcr2ImageProcessor"
    fields = MappingProxyType({"crop_to_patches": True})
    item_options = ("max_patches", "crop_to_patches")
    bounds = ("max_patches",)

    def num_tokens(self, made):
        return 4 * len(made["pixel_values"])

    def written(self, made):
        return f"<img>{super().written(made)}</img>"


class Grids(TransformersImages):
    """Takes the processor that the checkpoint names, and gives a grid."""

    token = "<pad>"
    markers = ("<start><pad><end>",)
    grid = "image_grid_thw"

    def num_tokens(self, made):
        return int(made["image_grid_thw"][0].prod()) // 4


class Squares(OneSizeImages):
    """Images of one size, with 4 tokens between marks."""

    token = "<ctx>"
    markers = ("<ctx>",)
    source = "CLIPImageProcessor"

    def of_tower(self, config):
        return (SIDE, SIDE), 4

    def written(self, made):
        return f"<img>{super().written(made)}</img>"


class Sounds(TransformersSounds):
    """A token for each four frames, as in Qwen2-Audio."""

    token = "<sound>"
    markers = ("<sound>",)
    tensors = ("input_features", "attention_mask")
    arguments = MappingProxyType({"return_attention_mask": True, "padding": "max_length"})

    def num_tokens(self, made):
        return ((int(made["attention_mask"].sum()) - 1) // 2 + 1 - 2) // 2 + 1


def checkpoint(folder, file=None):
    (folder / "preprocessor_config.json").write_text(json.dumps(TILES if file is None else file))
    return Checkpoint(folder=folder, config=None, preprocessor=TILES if file is None else file)


class TestTiles(MediaProcessorConformance):
    spec = MediaProcessorSpec(name="tiles", kind="image", factory=f"{__name__}:Tiles")
    checkpoint = staticmethod(checkpoint)
    other_options = MappingProxyType({"max_patches": 2})
    item_options = MappingProxyType({"crop_to_patches": False})


class TestSquares(MediaProcessorConformance):
    spec = MediaProcessorSpec(name="squares", kind="image", factory=f"{__name__}:Squares")

    @staticmethod
    def checkpoint(folder):
        return checkpoint(folder, SQUARES)


class TestSounds(MediaProcessorConformance):
    spec = MediaProcessorSpec(name="sounds", kind="audio", factory=f"{__name__}:Sounds")
    samples = MappingProxyType(
        {
            "short": (np.sin(np.arange(8_000, dtype=np.float32) / 20), 16_000),
            "other rate": (np.sin(np.arange(9_000, dtype=np.float32) / 30), 8_000),
        }
    )
    corrupt = MappingProxyType({"empty": b"", "noise": b"RIFF" + bytes(range(200))})
    too_large = MappingProxyType(
        {"longer": ((np.zeros(16_000 * 31, np.float32), 16_000), MediaLimits())}
    )
    item_options = MappingProxyType({"end": 0.2})

    @staticmethod
    def checkpoint(folder):
        return checkpoint(folder, SOUNDS)


@pytest.mark.parametrize("size", [(600, 100), (56, 56), (100, 300)])
def test_images_are_those_of_transformers(tmp_path, size):
    image = Image.fromarray(pixels(*size[::-1], seed=1))
    processor = Tiles(checkpoint(tmp_path), {})
    made = processor.process(processor.decode(image, MediaLimits()), {})
    kind = transformers.GotOcr2ImageProcessorPil
    wanted = kind(**TILES, crop_to_patches=True)(images=[image], return_tensors="pt")
    assert torch.equal(made.tensors["pixel_values"], wanted["pixel_values"])
    assert made.num_tokens == 4 * len(wanted["pixel_values"])
    assert made.prompt_text == f"<img>{'<ctx>' * made.num_tokens}</img>"
    assert set(made.tensors) == {"pixel_values"}


def test_images_of_one_size(tmp_path):
    """A file that makes another size is refused at once; an image that is not made of the tower's
    size, since it is not cropped or not resized, fails alone."""
    with pytest.raises(CheckpointError, match="of 48 x 40 pixels, but the tower reads 56 x 56;"):
        Squares(checkpoint(tmp_path, SQUARES), {"crop_size": {"height": 40, "width": 48}})
    for options in ({"do_center_crop": False}, {"do_resize": False, "do_center_crop": False}):
        processor = Squares(checkpoint(tmp_path, SQUARES), options)
        made = processor.prepare(Image.new("RGB", (SIDE, SIDE)), {})
        assert made.text == "<img><ctx><ctx><ctx><ctx></img>" == processor.text((9, 9), {})
        with pytest.raises(MediaError, match="of 112 x 56 pixels, but the tower reads 56 x 56"):
            processor.prepare(Image.new("RGB", (2 * SIDE, SIDE)), {})


def test_options_of_images(tmp_path):
    header = ImageHeader(size=(600, 100))
    processor = Tiles(checkpoint(tmp_path), {"max_patches": 3})
    assert processor.count_tokens(header, {}) == 16
    assert processor.count_tokens(header, {"max_patches": 2}) == 12
    assert processor.count_tokens(header, {"crop_to_patches": False}) == 4
    with pytest.raises(MediaError, match="max_patches = 4 is above the engine's 3"):
        processor.count_tokens(header, {"max_patches": 4})
    with pytest.raises(ConfigError, match=r"no option 'max_patch'; did you mean 'max_patches'"):
        Tiles(checkpoint(tmp_path), {"max_patch": 3})
    assert Tiles(checkpoint(tmp_path), {"crop_to_patches": False}).count_tokens(header, {}) == 4


@pytest.mark.parametrize("tokens", [4, 11, 20])
def test_budgets_of_images(tmp_path, tokens):
    limited = Tiles(checkpoint(tmp_path), {}).with_budget(tokens)
    item = limited.decode(Image.fromarray(pixels(100, 600, seed=1)), MediaLimits())
    made = limited.process(item, {})
    assert made.num_tokens == limited.count_tokens(item, {}) <= tokens
    assert made.num_tokens == 4 * len(made.tensors["pixel_values"])


def test_the_class_that_the_checkpoint_names_with_its_grid(tmp_path):
    file = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2}
    processor = Grids(checkpoint(tmp_path, file), {})
    image = Image.fromarray(pixels(84, 112, seed=1))
    made = processor.process(processor.decode(image, MediaLimits()), {})
    assert made.grid_thw == (1, 6, 8)
    assert made.num_tokens == 12
    assert processor.embedded(12, (1, 6, 8), {"size": (112, 84)}).grid_thw == (1, 6, 8)


def test_classes_that_cannot_be_used(tmp_path):
    class Unknown(Tiles):
        source = "NoSuchImageProcessor"

    with pytest.raises(UnsupportedMediaError, match="NoSuchImageProcessor exists in transformers"):
        Unknown(checkpoint(tmp_path), {})
    with pytest.raises(CheckpointError, match="Processor cannot be made from the checkpoint"):
        Tiles(checkpoint(tmp_path, {"size": "large"}), {})
    with pytest.raises(UnsupportedMediaError, match="no file that describes a feature extractor"):
        Sounds(checkpoint(tmp_path, {}), {})
    file = {"feature_extractor_type": "Nothing"}
    with pytest.raises(UnsupportedMediaError, match="no feature extractor 'Nothing'"):
        Sounds(checkpoint(tmp_path, file), {})


def test_sounds_are_those_of_transformers(tmp_path):
    samples = np.sin(np.arange(20_000, dtype=np.float32) / 25)
    processor = Sounds(checkpoint(tmp_path, SOUNDS), {})
    made = processor.process(processor.decode((samples, 16_000), MediaLimits()), {})
    kind = transformers.WhisperFeatureExtractor
    wanted = kind(feature_size=8)(
        samples, sampling_rate=16_000, return_tensors="pt", **Sounds.arguments
    )
    for name in Sounds.tensors:
        assert torch.equal(made.tensors[name], wanted[name])
    assert made.num_tokens == 31
    assert made.seconds == 1.25
    assert processor.embedded(7, None, {}).prompt_text == "<sound>" * 7


def test_lengths_of_sounds(tmp_path):
    processor = Sounds(checkpoint(tmp_path, SOUNDS), {})
    assert processor.most == 30
    long = processor.decode((np.zeros(16_000 * 31, np.float32), 16_000), MediaLimits())
    with pytest.raises(MediaLimitError, match="WhisperFeatureExtractor cuts the rest off"):
        processor.count_tokens(long, {})
    assert processor.count_tokens(long, {"start": 2}) == processor.count_tokens(long, {"end": 29})
    tiny = processor.decode((np.zeros(1, np.float32), 16_000), MediaLimits())
    with pytest.raises(MediaError, match=r"too short for this model: 0\.0001 s have no token"):
        processor.process(tiny, {})


def test_threads_have_processors_of_their_own(tmp_path):
    processor = Tiles(checkpoint(tmp_path), {})
    with processor._lender.lent() as one, processor._lender.lent() as two:
        assert one is not two
    with processor._lender.lent() as again:
        assert again in (one, two)
    sizes = [(600, 100), (56, 56), (100, 300)] * 8
    items = [processor.decode(Image.new("RGB", size), MediaLimits()) for size in sizes]
    with ThreadPoolExecutor(8) as pool:
        counts = list(pool.map(lambda item: processor.process(item, {}).num_tokens, items))
    assert counts == [processor.count_tokens(item, {}) for item in items]


def test_images_that_would_become_too_large():
    """Resized by the shorter side before it is cropped, a strip would take gigabytes."""
    fields = {"size": {"shortest_edge": 224, "longest_edge": None}}
    assert longest_shape(fields, is_upright=False) == pytest.approx(2**28 / 224**2)
    with (
        pytest.raises(MediaError, match=r"65535 x 1 pixels is too long.* up to 5349 times"),
        shapes_told(fields, (65535, 1)),
    ):
        raise AssertionError("refused before")
    for free in ({"shortest_edge": 56, "longest_edge": 9}, {"height": 9, "width": 9}, None):
        assert longest_shape({"size": free}, is_upright=True) is None
    assert longest_shape({**fields, "do_resize": False}, is_upright=True) is None
