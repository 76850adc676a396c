"""The video processor for any model passes the kit's checks, and names what it cannot serve."""

import json

import pytest
import transformers
from mmdeploy_llm_plugins.transformers_any import VIDEOS
from mmdeploy_llm_plugins.transformers_media.video.processor import AnyVideoProcessor

from mmdeploy_llm.errors import UnsupportedMediaError
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm.testing import MediaProcessorConformance
from mmdeploy_llm.testing.tiny import make_tokenizer

SQUARE = {"height": 28, "width": 28}


def onevision(folder, **video):
    """Writes the files of LLaVA-OneVision's processor, without a model. video: fields of the video
    processor."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>", "<video>"]})
    tokenizer.save_pretrained(folder)
    processor = {"processor_class": "LlavaOnevisionProcessor", "num_image_tokens": 4}
    images = {"image_processor_type": "LlavaOnevisionImageProcessor", "size": SQUARE}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    config = transformers.LlavaOnevisionConfig(
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
    )
    given = {"video_processor_type": "LlavaOnevisionVideoProcessor", "size": SQUARE, **video}
    return Checkpoint(folder=folder, config=config, preprocessor=images, video_preprocessor=given)


class TestConformance(MediaProcessorConformance):
    spec = VIDEOS
    other_options = {"video_num_frames": 2}  # noqa: RUF012 - never written to

    @staticmethod
    def checkpoint(folder):
        return onevision(folder)


def test_a_model_without_videos(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedMediaError, match="no video processor for the model type"):
        AnyVideoProcessor(Checkpoint(folder=tmp_path, config=transformers.LlamaConfig()), {})


def test_a_processor_that_needs_more_of_torchvision(tmp_path):
    checkpoint = onevision(tmp_path, video_processor_type="Ernie4_5_VLMoeVideoProcessor")
    with pytest.raises(UnsupportedMediaError, match=r"needs torchvision .*'pil_to_tensor'"):
        AnyVideoProcessor(checkpoint, {})


def test_a_processor_that_cannot_work_with_its_fields(tmp_path):
    checkpoint = onevision(tmp_path, size={"longest_edge": 28})
    with pytest.raises(UnsupportedMediaError, match="fails on a trial video without torchvision"):
        AnyVideoProcessor(checkpoint, {})


def test_processors_made_wrongly_leave_images_alone(tmp_path):
    checkpoint = onevision(tmp_path)
    (tmp_path / "processor_config.json").write_text('{"processor_class": "LlavaProcessor"}')
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "Nonsense"}')
    with pytest.raises(UnsupportedMediaError, match=r"with videos, .*cannot be made"):
        AnyVideoProcessor(checkpoint, {})
