"""The image processor for any model passes the kit's checks and reads options and checkpoints
as it should."""

import json
import re

import pytest
import transformers
from mmdeploy_llm_plugins.transformers_any import IMAGES
from mmdeploy_llm_plugins.transformers_media import processing
from mmdeploy_llm_plugins.transformers_media.processor import AnyImageProcessor, place_of_number
from transformers.utils import is_torchvision_available

from mmdeploy_llm.errors import CheckpointError, ConfigError, MediaError, UnsupportedMediaError
from mmdeploy_llm.hooks import Checkpoint, MediaLimits
from mmdeploy_llm.testing import MediaProcessorConformance
from mmdeploy_llm.testing.tiny import make_tokenizer

IDEFICS = {
    "image_processor_type": "Idefics3ImageProcessor",
    "size": {"longest_edge": 56},
    "max_image_size": {"longest_edge": 28},
}


def idefics(folder, image_token="<image>"):
    """Writes the files of Idefics3's processor, without a model."""
    tokenizer = make_tokenizer()
    rows = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    special = ["<image>", "<fake_token_around_image>", "<global-img>", *rows]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.save_pretrained(folder)
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": 4}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    (folder / "preprocessor_config.json").write_text(json.dumps(IDEFICS))
    config = transformers.Idefics3Config()
    config.image_token_id = tokenizer.convert_tokens_to_ids(image_token)
    return Checkpoint(folder=folder, config=config)


class TestConformance(MediaProcessorConformance):
    spec = IMAGES
    other_options = {"do_image_splitting": False}  # noqa: RUF012 - never written to

    @staticmethod
    def checkpoint(folder):
        return idefics(folder)


def test_rows_and_columns_are_the_processors_own(tmp_path, picture):
    processor = AnyImageProcessor(idefics(tmp_path), {})
    item = processor.decode(picture(0, 56, 30), MediaLimits())
    made = processor.process(item, {})
    text = "<fake_token_around_image><row_1_col_1>" + "<image>" * 4
    assert made.prompt_text.startswith(text)
    assert made.num_tokens == made.prompt_text.count("<image>") == 4 * (2 * 2 + 1)
    assert made.tensors["pixel_values"].shape == (1, 5, 3, 28, 28)
    assert set(made.tensors) == {"pixel_values", "pixel_attention_mask"}


def test_options_of_the_caller_win(tmp_path, picture):
    processor = AnyImageProcessor(idefics(tmp_path), {"do_image_splitting": False, "video_fps": 2})
    item = processor.decode(picture(0, 56, 30), MediaLimits())
    assert processor.process(item, {}).num_tokens == processor.count_tokens(item, {}) == 4


def test_an_unknown_option(tmp_path):
    with pytest.raises(ConfigError, match="no option 'do_image_spliting'; did you mean"):
        AnyImageProcessor(idefics(tmp_path), {"do_image_spliting": False})


def test_options_of_one_image_are_refused(tmp_path, picture):
    processor = AnyImageProcessor(idefics(tmp_path), {})
    item = processor.decode(picture(0, 56, 30), MediaLimits())
    with pytest.raises(MediaError, match="takes no options of its own, found 'size'"):
        processor.process(item, {"size": 28})


def test_a_text_model_has_no_images(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedMediaError, match="no processor of images for the model type"):
        AnyImageProcessor(Checkpoint(folder=tmp_path, config=transformers.LlamaConfig()), {})


def test_files_that_cannot_be_used(tmp_path):
    checkpoint = idefics(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "Nonsense"}')
    with pytest.raises(CheckpointError, match="Idefics3Processor cannot be made"):
        AnyImageProcessor(checkpoint, {})


@pytest.mark.skipif(is_torchvision_available(), reason="torchvision is installed")
def test_images_that_need_torchvision(tmp_path):
    checkpoint = idefics(tmp_path)
    needed = '{"image_processor_type": "Cohere2VisionImageProcessor"}'
    (tmp_path / "preprocessor_config.json").write_text(needed)
    with pytest.raises(UnsupportedMediaError, match="torchvision only, which is not installed"):
        AnyImageProcessor(checkpoint, {})


def idefics2(folder):
    checkpoint = idefics(folder)
    options = {"processor_class": "Idefics2Processor", "image_seq_len": 4}
    (folder / "processor_config.json").write_text(json.dumps(options))
    return checkpoint


def test_idefics2_writes_edges_once(tmp_path, picture):
    """One between two images, and a space between an edge and a word, as transformers does."""
    processor = AnyImageProcessor(idefics2(tmp_path), {"do_image_splitting": True})
    image = picture(0, 56, 30)
    made = processor.process(processor.decode(image, MediaLimits()), {})
    assert made.num_tokens == made.prompt_text.count("<image>") == 4 * 5
    prompt = "a <image><image>b <image>."
    theirs = processor._processor
    wanted = theirs(images=[image] * 3, text=[prompt])["input_ids"][0]
    text = prompt.replace("<image>", made.prompt_text)
    for pattern, joint in processor.joints:
        text = re.sub(pattern, joint, text)
    assert theirs.tokenizer(text)["input_ids"] == wanted


def test_a_processor_that_does_not_tell_the_text_of_an_image(tmp_path, picture, monkeypatch):
    monkeypatch.setattr(processing, "JOINTS", {})
    checkpoint = idefics2(tmp_path)
    processor = AnyImageProcessor(checkpoint, {})
    item = processor.decode(picture(0, 56, 30), MediaLimits())
    with pytest.raises(MediaError, match="Idefics2Processor does not say how it writes an image"):
        processor.process(item, {})


def test_a_processor_that_does_not_return_the_text_of_an_image(tmp_path, picture):
    """Some write it as others do, and keep it to themselves (Nemotron Omni)."""
    processor = AnyImageProcessor(idefics(tmp_path), {})
    item = processor.decode(picture(0, 56, 30), MediaLimits())
    wanted = processor.process(item, {}).prompt_text
    silent = AnyImageProcessor(idefics(tmp_path), {})
    made = type(silent._processor)
    base = made.__mro__[1]

    def call(self, **given):
        found = base.__call__(self, **given)
        del found["text_replacement_offsets"]
        return found

    made.__call__ = call
    assert silent.process(item, {}).prompt_text == wanted


def test_no_two_threads_use_the_same_tokenizer(tmp_path):
    processor = AnyImageProcessor(idefics(tmp_path), {})
    with processor._lender.lent() as first, processor._lender.lent() as second:
        assert first.tokenizer is not second.tokenizer


class Numbering:
    """A processor that writes the images of a prompt by a function of their numbers."""

    image_token, image_id_start_token = "<image>", "<id>"

    def __init__(self, write):
        self._write = write

    def __call__(self, images, text, **_):
        (prompt,) = text
        found = [{"replacement": self._write(n)} for n in range(prompt.count(self.image_token))]
        return {"text_replacement_offsets": [found]}


def test_the_place_of_an_images_number():
    assert place_of_number(Numbering(lambda number: f"<id>{number}</id><image>")) == 4
    assert place_of_number(Numbering(lambda number: "<image>")) is None
    assert place_of_number(object()) is None
    with pytest.raises(UnsupportedMediaError, match="writes the second image of a prompt as 'b"):
        place_of_number(Numbering(lambda number: "ab"[number] + "<image>"))
