"""Kosmos-2.5 against transformers: the model with the checks of every family, its images and whole
answers."""

import json

import pytest
import torch
import transformers
from mmdeploy_llm_plugins import kosmos
from mmdeploy_llm_plugins.kosmos.image import KosmosImages
from mmdeploy_llm_plugins.kosmos.tiny import MOST, NUM_TOKENS
from transformers.models.kosmos2_5.image_processing_pil_kosmos2_5 import Kosmos2_5ImageProcessorPil
from transformers.models.kosmos2_5.processing_kosmos2_5 import Kosmos2_5Processor

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.media import ImageHeader
from mmdeploy_llm.testing import MediaProcessorConformance, ModelConformance
from mmdeploy_llm.weights.folder import read_checkpoint
from tests.plugins.encoder_answers import EncoderAnswers
from tests.plugins.pictures import picture

(SPEC,) = kosmos.provide_models()
(IMAGES,) = kosmos.provide_media_processors()


@pytest.mark.full
class TestModel(ModelConformance):
    spec = SPEC


@pytest.mark.full
class TestImages(MediaProcessorConformance):
    spec = IMAGES
    other_options = {"max_patches": 12}  # noqa: RUF012 - never written to


SIZES = [(80, 50), (33, 90), (7, 7), (1, 10), (300, 20), (24, 25)]


@pytest.fixture(scope="module")
def folder(tiny_folder):
    return tiny_folder("kosmos2_5")


def theirs(folder):
    """Returns transformers' processor of the folder, on Pillow alone."""
    processor = Kosmos2_5Processor(
        Kosmos2_5ImageProcessorPil.from_pretrained(folder),
        transformers.AutoTokenizer.from_pretrained(folder),
        num_image_tokens=NUM_TOKENS,
    )
    return lambda text, image: processor(text=text, images=image, max_patches=MOST)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("size", SIZES)
def test_patches_equal_those_of_transformers(folder, size):
    processor = KosmosImages(read_checkpoint(folder), {})
    made = processor.prepare(picture(1, size), {})
    expected = theirs(folder)("<ocr>", picture(1, size))
    assert torch.equal(made.tensors["flattened_patches"], expected["flattened_patches"])
    shown = processor.shown_size(ImageHeader(size=size), {})
    assert shown == (int(expected["width"][0]), int(expected["height"][0]))
    assert made.text == processor.text(size, {}) == f"<s><image>{'<pad>' * NUM_TOKENS}</image>"


def test_a_picture_with_more_columns_than_the_model_knows(folder):
    wide = KosmosImages(read_checkpoint(folder), {"max_patches": 60})
    with pytest.raises(MediaError, match=r"1 x 60 patches, but the model knows 47 rows and col"):
        wide.prepare(picture(0, (900, 1)), {})


SAMPLING = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, repetition_penalty=8)


@pytest.mark.full
class TestAnswers(EncoderAnswers):
    prompts = (
        ("<ocr>", (0,)),
        ("<md>", (1,)),
        ("<ocr>", (2,)),
        ("<md>The quick brown fox", (3,)),
        ("", (4,)),
    )
    num_different = 5
    num_tokens = 30
    repetition_penalty = 8.0
    sizes = SIZES

    @classmethod
    def reference(cls, folder):
        processor = theirs(folder)
        model = transformers.Kosmos2_5ForConditionalGeneration.from_pretrained(folder).eval()

        def inputs(text, pictures):
            made = processor(text, pictures[0])
            return {name: made[name] for name in made if name not in ("width", "height")}

        return model, inputs

    def prompt(self, text, pictures, ids):
        start = "<s><image>" if text.startswith("<md>") else "<image>"
        return super().prompt(start + text, pictures, ids)


@pytest.mark.full
def test_a_conversation_where_the_checkpoint_has_no_template(tiny_copy, tmp_path):
    tiny_copy("kosmos2_5", tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), "chat_template": ""}))
    image = picture(0, SIZES[0])
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "<ocr>"}]
    with LLM(str(tmp_path), dtype="float32", use_warmup=False, kv_cache_memory=2**22) as llm:
        (found,) = llm.chat([{"role": "user", "content": parts}], SAMPLING)
        written = {"prompt": "<image><ocr>", "multimodal_data": {"image": image}}
        (expected,) = llm.generate([written], SAMPLING)
        assert llm.count_tokens(written).num_input_image_tokens == NUM_TOKENS
    assert found.is_ok, found.error_msg
    assert found.prompt_token_ids == expected.prompt_token_ids
    assert found.outputs.token_ids == expected.outputs.token_ids


def test_a_prompt_of_ids_that_are_written_out_is_taken_as_it_is(folder):
    """Those that transformers' processor returns, those of a prompt in text, and one too few."""
    images = [picture(1, (80, 50))]
    options = {"use_warmup": False, "num_threads": 1, "kv_cache_memory": 2**24}
    one = SamplingParams(temperature=0, max_tokens=1)
    with LLM(model=str(folder), **options) as llm:

        def answered(**prompt):
            request = {**prompt, "multimodal_data": {"image": images}}
            return llm.generate(request, one, use_tqdm=False)[0]

        text = answered(prompt="<image><ocr>")
        ids = list(text.prompt_token_ids)
        assert ids == theirs(folder)("<ocr>", images[0])["input_ids"][0].tolist()
        again = answered(prompt_token_ids=ids)
        assert list(again.prompt_token_ids) == ids
        assert again.outputs.token_ids == text.outputs.token_ids
        wrong = answered(prompt_token_ids=ids[:4] + ids[5:])
        assert "placeholder" in wrong.error_msg
        assert "for each item, written <image>;" in answered(prompt="<ocr>").error_msg
