"""Models of two towers against transformers."""

import json

import numpy as np
import pytest
import torch
import transformers
from mmdeploy_llm_plugins.clip import provide_media_processors, provide_models
from mmdeploy_llm_plugins.clip.image import FlexibleImages, TipsImages, TowerImages
from mmdeploy_llm_plugins.clip.tiny import SIDE
from PIL import Image

from mmdeploy_llm import LLM
from mmdeploy_llm.errors import CheckpointError, ModelNotSupportedError
from mmdeploy_llm.hooks import MediaInput, MediaLimits, MediaSpan
from mmdeploy_llm.testing.embedder_conformance import EmbedderConformance
from mmdeploy_llm.testing.model_conformance import build
from mmdeploy_llm.testing.models.models import ModelSubject
from mmdeploy_llm.testing.tiny import write_tiny
from mmdeploy_llm.weights.folder import read_checkpoint

SPECS = {spec.name: spec for spec in provide_models()}
PROCESSORS = {
    "clip": TowerImages,
    "siglip": TowerImages,
    "siglip2": FlexibleImages,
    "tipsv2": TipsImages,
}


def image(config, seed):
    """Returns random pixels of an image, of a shape of its own where the model takes any."""
    generator = torch.Generator().manual_seed(seed)
    if config.model_type == "siglip2":
        rows = torch.randn(1, 24, 3 * 16 * 16, generator=generator)
        shape = torch.tensor([[(4, 6), (3, 7), (24, 1)][seed % 3]])
        tensors = {"pixel_values": rows, "spatial_shapes": shape}
    else:
        tensors = {"pixel_values": torch.randn(1, 3, SIDE, SIDE, generator=generator)}
    return MediaInput(kind="image", tensors=tensors, num_tokens=1, key=f"image-{seed}")


def make_prompt(config, grids, *, seed=0):
    """Returns an image with a placeholder's id, which no text has, or a text."""
    vocab_size = config.text_config.vocab_size
    if grids:
        return [vocab_size], [MediaSpan(offset=0, item=image(config, seed))]
    generator = torch.Generator().manual_seed(seed)
    is_filled = config.model_type.startswith("siglip")
    length = 40 if is_filled else (21, 7, 40)[seed % 3]
    ids = torch.randint(60, vocab_size, (length,), generator=generator).tolist()
    ids[-1] = config.text_config.eos_token_id
    return ids, []


CASES = {
    "text": (),
    "image": ((1, 1, 1),),
    "other image": ((1, 1, 1),),
    "other text": (),
    "a third image": ((1, 1, 1),),
}


class TestTowers(EmbedderConformance):
    @pytest.fixture(
        scope="class",
        params=["clip", pytest.param("siglip", marks=pytest.mark.full), "siglip2", "tipsv2"],
    )
    @classmethod
    def subject(cls, request, tiny_folder):
        folder = tiny_folder(request.param)
        return ModelSubject(
            spec=SPECS[request.param],
            folder=folder,
            config=read_checkpoint(folder).config,
            cases=CASES,
            tolerance=2e-5,
            make_prompt=make_prompt,
            make_reference=cls.make_reference,
        )


def reference_of(name, folder):
    """Returns transformers' processor. TIPSv2's needs torchvision; the one here is its description
    in a few lines: bilinear, and between 0 and 1."""
    if name != "tipsv2":
        return transformers.AutoImageProcessor.from_pretrained(folder)

    def prepare(images, return_tensors):
        made = images[0].resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.asarray(made, dtype=np.float32)).permute(2, 0, 1) / 255
        return {"pixel_values": pixels[None]}

    return prepare


@pytest.mark.parametrize("name", SPECS)
def test_pixels_are_those_of_transformers_and_an_image_has_one_token(name, tiny_folder):
    folder = tiny_folder(name)
    processor = PROCESSORS[name](read_checkpoint(folder), {})
    reference = reference_of(name, folder)
    pixels = np.random.default_rng(0)
    for size in ((50, 70, 3), (200, 40, 3), (9, 9, 3)):
        picture = Image.fromarray(pixels.integers(0, 255, size, dtype=np.uint8))
        made = processor.process(processor.decode(picture, MediaLimits()), {})
        expected = reference(images=[picture], return_tensors="pt")
        assert made.num_tokens == 1
        for key, value in made.tensors.items():
            most = 1e-7 if name == "tipsv2" else 0
            torch.testing.assert_close(value, expected[key], rtol=0, atol=most)


def test_each_model_has_a_processor():
    assert {name for spec in provide_media_processors() for name in spec.models} == {*SPECS}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("clip", {"crop_size": {"height": 24, "width": 24}}, "24 x 24 pixels, .* reads 32 x 32"),
        ("siglip", {"size": {"height": 32, "width": 48}}, "48 x 32 pixels, .* reads 32 x 32"),
        ("siglip2", {"patch_size": 4}, "patches of 4 pixels, .* takes 16"),
    ],
)
def test_images_of_another_size_are_refused(name, options, message, tiny_folder):
    with pytest.raises(CheckpointError, match=message):
        PROCESSORS[name](read_checkpoint(tiny_folder(name)), options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_use_head": False}, "vision_use_head"),
        ({"image_size": 30}, "image_size 30 and patch_size 8"),
        ({"hidden_act": "mish"}, "'mish'"),
    ],
)
def test_what_a_config_may_not_ask_for_is_refused(changes, message, tiny_folder):
    config = read_checkpoint(tiny_folder("siglip")).config
    for field, value in changes.items():
        setattr(config.vision_config, field, value)
    with pytest.raises(ModelNotSupportedError, match=message):
        build(SPECS["siglip"], tiny_folder("siglip"), config, torch.float32)


def test_an_end_token_that_no_text_needs(tmp_path):
    """SigLIP's config class names one beyond its vocabulary, and nothing is generated."""
    folder = write_tiny("siglip", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["text_config"]["eos_token_id"] = 49_407
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    with LLM(str(folder), quiet=True) as llm:
        picture = Image.new("RGB", (SIDE, SIDE), "red")
        prompt = {"multimodal_data": {"image": [picture]}}
        output = llm.embed([prompt], use_tqdm=False)[0]
    assert output.is_ok, output.error_msg
