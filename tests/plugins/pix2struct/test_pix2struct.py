"""Pix2Struct against transformers: the model with the checks of every family, its images with and
without questions, and whole answers."""

import json

import numpy as np
import pytest
import torch
import transformers
from mmdeploy_llm_plugins import pix2struct
from mmdeploy_llm_plugins.pix2struct.image import Pix2StructImages
from mmdeploy_llm_plugins.pix2struct.model import distance_buckets
from mmdeploy_llm_plugins.pix2struct.prompts import FONT, Pix2StructPrompts
from PIL import ImageFont
from transformers.models.pix2struct.image_processing_pil_pix2struct import (
    Pix2StructImageProcessorPil,
)
from transformers.models.pix2struct.modeling_pix2struct import Pix2StructTextAttention

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.errors import CheckpointError, ConfigError, MediaError, RequestError
from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.testing import MediaProcessorConformance, ModelConformance
from mmdeploy_llm.weights.folder import read_checkpoint
from tests.plugins.encoder_answers import EncoderAnswers
from tests.plugins.pictures import picture

(SPEC,) = pix2struct.provide_models()
(IMAGES,) = pix2struct.provide_media_processors()


@pytest.mark.full
class TestModel(ModelConformance):
    spec = SPEC


@pytest.mark.full
class TestImages(MediaProcessorConformance):
    spec = IMAGES
    other_options = {"do_normalize": False}  # noqa: RUF012 - never written to


@pytest.fixture(scope="module")
def folder(tiny_folder):
    return tiny_folder("pix2struct")


SIZES = [(80, 50), (33, 90), (7, 7), (1, 10), (300, 20), (24, 25)]


@pytest.mark.parametrize("size", SIZES)
def test_patches_equal_those_of_transformers(folder, size):
    processor = Pix2StructImages(read_checkpoint(folder), {})
    made = processor.prepare(picture(1, size), {})
    theirs = Pix2StructImageProcessorPil.from_pretrained(folder)
    expected = theirs(picture(1, size), return_tensors="pt")
    count = int(expected["attention_mask"].sum())
    assert torch.equal(made.tensors["flattened_patches"], expected["flattened_patches"])
    assert made.text == processor.text(size, {}) == processor.token * count


def test_a_budget_is_the_bound_of_patches(folder):
    processor = Pix2StructImages(read_checkpoint(folder), {})
    for tokens in (5, 12, 24):
        limited = processor.with_budget(tokens)
        counts = [len(limited._levels[0].text(size, {})) // len("<image>") for size in SIZES]
        assert 0.6 * tokens <= max(counts) <= tokens
    raised = processor.with_budget(40, may_raise=True)._levels[0]
    assert 24 < raised.text((50, 50), {}).count("<image>") <= 40
    own = Pix2StructImages(read_checkpoint(folder), {"max_patches": 6})
    assert own.with_budget(40, may_raise=True)._levels[0].text((9, 9), {}).count("<image>") <= 6


def test_a_picture_with_more_columns_than_the_model_knows(folder):
    wide = Pix2StructImages(read_checkpoint(folder), {"max_patches": 60})
    with pytest.raises(MediaError, match=r"1 x 60 patches, but the model knows 47 rows and col"):
        wide.prepare(picture(0, (900, 1)), {})


def test_buckets_equal_those_of_transformers():
    for buckets, most in ((32, 128), (8, 20), (6, 11)):
        theirs = Pix2StructTextAttention._relative_position_bucket(
            -torch.arange(500), bidirectional=False, num_buckets=buckets, max_distance=most
        )
        assert torch.equal(distance_buckets(500, buckets, most), theirs)


SAMPLING = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.mark.full
class TestAnswers(EncoderAnswers):
    prompts = (
        (" ", (0,)),
        (" ", (1,)),
        ("The quick", (2,)),
        ("The quick brown fox jumps over", (3,)),
        (" ", (0,)),
    )
    num_different = 4
    num_tokens = 40
    sizes = SIZES
    max_model_len = 128  # the checkpoint sets none

    @classmethod
    def reference(cls, folder):
        images = Pix2StructImageProcessorPil.from_pretrained(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.Pix2StructForConditionalGeneration.from_pretrained(folder).eval()
        start = model.config.text_config.decoder_start_token_id

        def inputs(text, pictures):
            words = tokenizer(text.strip(), add_special_tokens=False)["input_ids"]
            ids = torch.tensor([[start, *words]])
            return {**images(pictures, return_tensors="pt"), "decoder_input_ids": ids}

        return model, inputs


@pytest.fixture
def asked(tiny_copy, tmp_path):
    """A checkpoint whose questions are drawn above its pictures, with the font that Pillow has, and
    as the published ones are, without a chat template."""
    tiny_copy("pix2struct", tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    changes = ("preprocessor_config", {"is_vqa": True}), ("tokenizer_config", {"chat_template": ""})
    for name, values in changes:
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **values}), "utf-8")
    (tmp_path / FONT).write_bytes(ImageFont.load_default(36).font_bytes)
    return tmp_path


QUESTIONS = [("What is the title of this?", 0), ("Who? " * 40, 1), ("What is the title", 0)]


@pytest.mark.full
def test_questions_are_drawn_above_the_pictures(asked):
    images = Pix2StructImageProcessorPil.from_pretrained(asked)
    model = transformers.Pix2StructForConditionalGeneration.from_pretrained(asked).eval()
    start = model.config.text_config.decoder_start_token_id
    expected, counts = [], []
    for text, seed in QUESTIONS:
        above = images.render_header(
            np.moveaxis(np.asarray(picture(seed, SIZES[seed])), -1, 0),
            text.strip(),
            font_path=str(asked / FONT),
        )
        made = images(above, is_vqa=False, input_data_format="channels_first", return_tensors="pt")
        counts.append(int(made["attention_mask"].sum()))
        out = model.generate(
            **made,
            decoder_input_ids=torch.tensor([[start]]),
            max_new_tokens=12,
            eos_token_id=None,
            do_sample=False,
        )
        expected.append(out[0].tolist())
    prompts = [
        {"prompt": text, "multimodal_data": {"image": picture(seed, SIZES[seed])}}
        for text, seed in QUESTIONS
    ]
    # Less than the questions have, which are no tokens of the decoder.
    options = {"kv_cache_memory": 2**22, "use_warmup": False, "max_model_len": 64}
    with LLM(str(asked), dtype="float32", **options) as llm:
        outputs = llm.generate(prompts, SAMPLING)
        found = [[*out.prompt_token_ids, *out.outputs.token_ids] for out in outputs]
        assert found == expected, [out.error_msg for out in outputs]
        assert [out.num_input_image_tokens for out in outputs] == counts
        assert [llm.count_tokens(one).num_input_image_tokens for one in prompts] == counts
        image = prompts[0]["multimodal_data"]["image"]
        parts = [{"type": "image", "image": image}, {"type": "text", "text": QUESTIONS[0][0]}]
        (chatted,) = llm.chat([{"role": "user", "content": parts}], SAMPLING)
        assert chatted.outputs.token_ids == outputs[0].outputs.token_ids, chatted.error_msg
    assert len({tuple(ids) for ids in expected}) == 3, "question and picture are seen"


def test_questions_that_cannot_be_drawn(asked):
    with pytest.raises(ConfigError, match="may set max_patches only, found do_normalize"):
        Pix2StructImages(read_checkpoint(asked), {"do_normalize": False})
    rule = Pix2StructPrompts(read_checkpoint(asked))
    item = MediaInput(kind="image", tensors={}, num_tokens=20, key="", size=(20, 30))
    for text in (None, " <image> "):
        with pytest.raises(RequestError, match="give the question as the text"):
            rule.divide(text, (), [item], len)
    with pytest.raises(RequestError, match="2001 characters, 2000 can be drawn"):
        rule.divide("a" * 2001, (), [item], len)
    (asked / FONT).unlink()
    with pytest.raises(CheckpointError, match=f"needs the font {FONT}"):
        Pix2StructPrompts(read_checkpoint(asked))
