"""GIT against transformers: the model with the checks of every family, its images and whole
answers, with pictures and without."""

import pytest
import torch
import transformers
from mmdeploy_llm_plugins import git
from mmdeploy_llm_plugins.git.image import GitImages, num_cells
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.testing import MediaProcessorConformance, ModelConformance
from mmdeploy_llm.weights.folder import read_checkpoint
from tests.plugins.encoder_answers import EncoderAnswers
from tests.plugins.pictures import picture

(SPEC,) = git.provide_models()
(IMAGES,) = git.provide_media_processors()


@pytest.mark.full
class TestModel(ModelConformance):
    spec = SPEC


@pytest.mark.full
class TestImages(MediaProcessorConformance):
    spec = IMAGES
    other_options = {"do_normalize": False}  # noqa: RUF012 - never written to


@pytest.fixture(scope="module")
def folder(tiny_folder):
    return tiny_folder("git")


def test_pictures_and_their_length(folder):
    checkpoint = read_checkpoint(folder)
    processor = GitImages(checkpoint, {})
    made = processor.prepare(picture(1), {})
    theirs = CLIPImageProcessorPil.from_pretrained(folder)
    expected = theirs(picture(1), return_tensors="pt")["pixel_values"]
    assert torch.equal(made.tensors["pixel_values"], expected)
    assert made.text == processor.token * num_cells(checkpoint.config.vision_config)
    checkpoint.config.vision_config.image_size = 64
    with pytest.raises(CheckpointError, match="32 x 32 pixels, but the tower reads 64 x 64"):
        GitImages(checkpoint, {})


@pytest.mark.full
class TestAnswers(EncoderAnswers):
    prompts = ((" ", (0,)), (" ", (1,)), ("The quick", (2,)), ("The quick brown", ()), (" ", (0,)))
    num_different = 4
    num_tokens = 30

    @classmethod
    def reference(cls, folder):
        images = CLIPImageProcessorPil.from_pretrained(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.GitForCausalLM.from_pretrained(folder).eval()

        def inputs(text, pictures):
            words = tokenizer(text.strip(), add_special_tokens=False)["input_ids"]
            made = dict(images(pictures, return_tensors="pt")) if pictures else {}
            return {**made, "input_ids": torch.tensor([[model.config.bos_token_id, *words]])}

        return model, inputs
