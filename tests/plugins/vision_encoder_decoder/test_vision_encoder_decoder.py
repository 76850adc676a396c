"""TrOCR and Donut against transformers: the models with the checks of every family, their images
and whole answers."""

from functools import partial
from types import SimpleNamespace

import pytest
import transformers
from mmdeploy_llm_plugins import vision_encoder_decoder
from mmdeploy_llm_plugins.vision_encoder_decoder.image import EncoderImages, num_cells
from mmdeploy_llm_plugins.vision_encoder_decoder.model import decoder_config
from mmdeploy_llm_plugins.vision_encoder_decoder.prompts import PicturePrompts
from mmdeploy_llm_plugins.vision_encoder_decoder.tiny import DONUT, TASK, TROCR
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from mmdeploy_llm.errors import (
    CheckpointError,
    MediaError,
    ModelNotSupportedError,
    RequestError,
)
from mmdeploy_llm.testing import MediaProcessorConformance, ModelConformance
from mmdeploy_llm.testing.tiny import write_family
from mmdeploy_llm.weights.folder import read_checkpoint
from tests.plugins.encoder_answers import EncoderAnswers
from tests.plugins.pictures import picture

(SPEC,) = vision_encoder_decoder.provide_models()
(IMAGES,) = vision_encoder_decoder.provide_media_processors()
FAMILIES = {"trocr": TROCR, "donut": DONUT}


@pytest.mark.full
class TestModel(ModelConformance):
    spec = SPEC


@pytest.mark.full
class TestImages(MediaProcessorConformance):
    spec = IMAGES
    other_options = {"do_normalize": False}  # noqa: RUF012 - never written to


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    """Untied, so that answers vary."""
    made = tmp_path_factory.mktemp(request.param)
    return write_family(FAMILIES[request.param], made, tie_word_embeddings=False)


@pytest.mark.full
class TestAnswers(EncoderAnswers):
    prompts = ((" ", (0,)), (TASK, (1,)), ("The quick", (2,)), (" ", (3,)), (TASK, (1,)))
    num_different = 4

    @classmethod
    def reference(cls, folder):
        images = AutoImageProcessor.from_pretrained(folder, backend="pil")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.VisionEncoderDecoderModel.from_pretrained(folder).eval()

        def inputs(text, pictures):
            made = {"pixel_values": images(pictures, return_tensors="pt")["pixel_values"]}
            words = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
            return {**made, "decoder_input_ids": words} if text.strip() else made

        return model, inputs


def test_pictures_and_their_length(folder):
    checkpoint = read_checkpoint(folder)
    processor = EncoderImages(checkpoint, {})
    made = processor.prepare(picture(1), {})
    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    assert (
        made.tensors["pixel_values"] == images(picture(1), return_tensors="pt")["pixel_values"]
    ).all()
    assert made.text == processor.token * num_cells(checkpoint.config.encoder)
    checkpoint.config.encoder.image_size = 48
    with pytest.raises(CheckpointError, match="the tower reads 48 x 48"):
        EncoderImages(checkpoint, {})


def test_a_prompt_without_a_picture(folder):
    with pytest.raises(MediaError, match="one image in each prompt, found 0"):
        PicturePrompts(read_checkpoint(folder)).divide(" ", (), (), len)


def test_a_task_that_the_checkpoint_does_not_know(folder):
    rule = PicturePrompts(read_checkpoint(folder))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    begin = partial(rule.begin, ids=(), encode=partial(tokenizer.encode, add_special_tokens=False))
    assert begin(f"{TASK}a <s> b")
    if "donut" in str(folder):
        with pytest.raises(RequestError, match="<s_cord-v2> is no token of this checkpoint"):
            begin(f"{TASK}<s_cord-v2>")
    else:  # words like others
        assert begin("<s_cord-v2>")


@pytest.mark.parametrize(
    ("decoder", "tower", "match"),
    [
        ({"model_type": "bert"}, {}, "decoders of trocr and mbart"),
        ({"use_learned_position_embeddings": False}, {}, "computes its positions"),
        ({}, {"model_type": "beit"}, "towers of vit, deit, donut-swin"),
    ],
)
def test_what_is_refused(decoder, tower, match):
    own = {"model_type": "trocr", "d_model": 8}
    config = SimpleNamespace(
        decoder=SimpleNamespace(**{**own, **decoder}),
        encoder=SimpleNamespace(**{"model_type": "vit", **tower}),
    )
    with pytest.raises(ModelNotSupportedError, match=match):
        decoder_config(config)
