"""InternVL and PDF documents as plugins of one file that an outsider could have written: they pass
the kit and compute what transformers does."""

import importlib
import sys
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.errors import MediaError, MediaLimitError, UnsupportedMediaError
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.media_checks.subject import checkpoint_of
from mmdeploy_llm.media_checks.truth import MediaTruth
from mmdeploy_llm.testing import (
    MediaProcessorConformance,
    ModelConformance,
    ModelVariantConformance,
    PluginConformance,
)

PLUGINS = Path(__file__).parents[2] / "examples" / "plugins"
sys.path.append(str(PLUGINS))
internvl, pdf = (importlib.import_module(name) for name in ("internvl", "pdf"))
MAX_LINES = {"internvl": 180, "pdf": 80, "picture": 40}
TILES = {
    "text": (),
    "one image": ((1, 4, 4),),
    "images of several tiles": ((1, 4, 4), (3, 4, 4), (1, 4, 4)),
}


@pytest.mark.parametrize("name", MAX_LINES)
def test_the_file_is_short(name):
    assert len((PLUGINS / f"{name}.py").read_text().splitlines()) <= MAX_LINES[name]


class TestInternVLPlugin(PluginConformance):
    plugin = "internvl"


class TestInternVL(ModelVariantConformance):
    spec = internvl.provide_models()[0]
    cases = MappingProxyType(TILES)

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, references):
        return references.tiny("internvl")


@pytest.mark.full
class TestInternVL3(TestInternVL):
    """Version 3, with Qwen2 and a tied head."""

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, references):
        return references.tiny("internvl", model_type="qwen2", tie_word_embeddings=True)


@pytest.mark.full
class TestAllOfInternVL(ModelConformance):
    """All checks of the kit."""

    spec = internvl.provide_models()[0]
    cases = MappingProxyType(TILES)

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, references):
        return references.tiny("internvl")


class TestInternVLImages(MediaProcessorConformance):
    spec = internvl.provide_media_processors()[0]
    other_options = ({"max_patches": 2}, {"image_mean": [0.1, 0.2, 0.3]})
    item_options = ({"max_patches": 3}, {"crop_to_patches": False})

    @classmethod
    def checkpoint(cls, folder):
        from mmdeploy_llm_plugins.internvl import provide_media_processors

        return checkpoint_of(provide_media_processors()[0], folder)

    @staticmethod
    def make_reference(kind, checkpoint):
        """transformers' processor, with tiles as InternVLProcessor asks for them."""

        def truth(source, options, markers):
            asked = {**checkpoint.preprocessor, "crop_to_patches": True, **options}
            made = GotOcr2ImageProcessorPil(**asked)(opened(source), return_tensors="pt")
            pixels = in_blocks(made["pixel_values"])
            count = 4 * len(made["pixel_values"])
            text = f"<img>{'<IMG_CONTEXT>' * count}</img>"
            return MediaTruth(tensors={"pixels": pixels}, num_tokens=count, prompt_text=text)

        return truth


def opened(source):
    """The image as transformers gets it."""
    return decode_image(source).image


def in_blocks(pixels):
    """Patch rows of tiles [I, 3, 56, 56], in blocks of 2 x 2."""
    cells = pixels.view(len(pixels), 3, 2, 2, 14, 2, 2, 14)
    return cells.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(len(pixels) * 16, -1)


@pytest.fixture(scope="module")
def manager():
    manager = PluginManager.load()
    for module, name in ((internvl, "one-file"), (pdf, "pdf-of-one-file")):
        manager.register(module, name)
    return manager


def test_the_processors_do_the_same(references):
    """Tokens, texts and pixels are those of the built-in plugin, with a budget too."""
    from mmdeploy_llm_plugins.internvl.image import InternVLImageProcessor

    checkpoint = read_checkpoint(references.tiny("internvl"))
    ours, theirs = internvl.images(checkpoint, {}), InternVLImageProcessor(checkpoint, {})
    for size in ((300, 100), (56, 56), (100, 400), (333, 211)):
        image = Image.fromarray(pixels(size[1], size[0], seed=3))
        for one, two in ((ours, theirs), (ours.with_budget(12), theirs.with_budget(12))):
            first, second = (
                processor.process(processor.decode(image, MediaLimits()), {})
                for processor in (one, two)
            )
            assert torch.equal(first.tensors["pixels"], second.tensors["pixels"])
            assert first.prompt_text == second.prompt_text


def test_answers_are_those_of_the_built_in_plugin(references, picture):
    folder = str(references.tiny("internvl"))
    images = [picture(1, 300, 100), picture(2, 56, 56)]
    prompt = {
        "prompt": "A <IMG_CONTEXT> and <IMG_CONTEXT>:",
        "multimodal_data": {"image": images},
    }
    params, answers = SamplingParams(temperature=0, max_tokens=6), []
    for own in ((), (internvl,)):
        with LLM(folder, quiet=True, limit_mm_per_prompt={"image": 2}) as llm:
            pass
