"""PP-FormulaNet against transformers: the model with the checks of every family, its images and
whole answers."""

import pytest
import torch
import transformers
from mmdeploy_llm_plugins import formulanet
from mmdeploy_llm_plugins.formulanet.image import FormulaImages, num_cells
from PIL import Image
from transformers.models.nougat.image_processing_pil_nougat import NougatImageProcessorPil

from mmdeploy_llm.errors import CheckpointError, MediaError
from mmdeploy_llm.testing import MediaProcessorConformance, ModelConformance
from mmdeploy_llm.weights.folder import read_checkpoint
from tests.plugins.encoder_answers import EncoderAnswers
from tests.plugins.pictures import picture

(SPEC,) = formulanet.provide_models()
(IMAGES,) = formulanet.provide_media_processors()


@pytest.mark.full
class TestModel(ModelConformance):
    spec = SPEC


@pytest.mark.full
class TestImages(MediaProcessorConformance):
    spec = IMAGES
    other_options = {"do_normalize": False}  # noqa: RUF012 - never written to


@pytest.fixture(scope="module")
def folder(tiny_folder):
    return tiny_folder("pp_formulanet")


def test_pictures_and_their_length(folder):
    checkpoint = read_checkpoint(folder)
    processor = FormulaImages(checkpoint, {})
    made = processor.prepare(picture(1), {})
    theirs = NougatImageProcessorPil.from_pretrained(folder)
    assert (
        made.tensors["pixel_values"] == theirs(picture(1), return_tensors="pt")["pixel_values"]
    ).all()
    assert made.text == processor.token * num_cells(checkpoint.config.vision_config)
    checkpoint.config.vision_config.image_size = 64
    with pytest.raises(CheckpointError, match="128 x 128 pixels, but the tower reads 64 x 64"):
        FormulaImages(checkpoint, {})


def test_pictures_that_are_too_long(folder):
    """The longer side becomes 128 pixels, so that the shorter one would vanish. Where it would once
    the margin is cut off, as of a page with one rule, the margin stays; where all but the margin is
    short enough, so is the picture."""
    processor = FormulaImages(read_checkpoint(folder), {})
    for size in ((9000, 2), (1, 129)):
        sizes = f"{size[0]} x {size[1]} pixels"
        with pytest.raises(MediaError, match=rf"{sizes} is too long.* up to 128 times .*; crop"):
            processor.prepare(picture(1).resize(size), {})
    assert processor.prepare(picture(1).resize((128, 1)), {}).text
    line = Image.new("RGB", (200, 200), "white")
    line.paste("black", (10, 10, 150, 11))
    whole = processor.prepare(line, {"do_crop_margin": False}).tensors["pixel_values"]
    assert (processor.prepare(line, {}).tensors["pixel_values"] == whole).all()
    strip = Image.new("RGB", (600, 3), "white")
    strip.paste("black", (10, 0, 40, 3))
    with pytest.raises(MediaError, match="600 x 3 pixels is too long"):
        processor.prepare(strip, {"do_crop_margin": False})
    theirs = NougatImageProcessorPil.from_pretrained(folder)(strip, return_tensors="pt")
    made = processor.prepare(strip, {}).tensors["pixel_values"]
    assert (made == theirs["pixel_values"]).all()


@pytest.mark.full
class TestAnswers(EncoderAnswers):
    prompts = ((" ", (0,)), (" ", (1,)), ("The quick", (2,)), (" ", (0,)))
    num_different = 3

    @classmethod
    def reference(cls, folder):
        images = NougatImageProcessorPil.from_pretrained(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.PPFormulaNetForConditionalGeneration.from_pretrained(folder).eval()
        start = model.config.text_config.decoder_start_token_id

        def inputs(text, pictures):
            words = tokenizer(text.strip(), add_special_tokens=False)["input_ids"]
            ids = torch.tensor([[start, *words]])
            return {**images(pictures, return_tensors="pt"), "decoder_input_ids": ids}

        return model, inputs
