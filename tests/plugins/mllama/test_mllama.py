"""Llama 3.2 Vision against transformers: the model with the checks of every family, its images,
which tokens see which picture, and whole answers."""

from dataclasses import replace

import pytest
import torch
import transformers
from mmdeploy_llm_plugins import mllama
from mmdeploy_llm_plugins.mllama.image import MllamaImages
from mmdeploy_llm_plugins.mllama.prompts import MllamaPrompts
from mmdeploy_llm_plugins.mllama.tiny import TOKEN
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.mllama.processing_mllama import (
    MllamaProcessor,
    get_cross_attention_token_mask,
)

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.errors import CheckpointError, MediaError, RequestError
from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.testing import MediaProcessorConformance, ModelConformance
from mmdeploy_llm.weights.folder import read_checkpoint
from tests.plugins.encoder_answers import EncoderAnswersInAllSettings
from tests.plugins.pictures import picture

(SPEC,) = mllama.provide_models()
(IMAGES,) = mllama.provide_media_processors()


@pytest.mark.full
class TestModel(ModelConformance):
    spec = SPEC


@pytest.mark.full
class TestImages(MediaProcessorConformance):
    spec = IMAGES
    other_options = {"do_normalize": False}  # noqa: RUF012 - never written to


SIZES = [(80, 50), (20, 20), (25, 90), (100, 30), (1, 300), (56, 56)]


@pytest.fixture(scope="module")
def folder(tiny_folder):
    return tiny_folder("mllama")


@pytest.fixture(scope="module")
def rule(folder):
    return MllamaPrompts(read_checkpoint(folder))


def theirs(folder):
    """Returns transformers' processor of the folder, on Pillow alone."""
    return MllamaProcessor(
        image_processor=MllamaImageProcessorPil.from_pretrained(folder),
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
    )


@pytest.mark.one_is_quick
@pytest.mark.parametrize("size", SIZES)
def test_pixels_equal_those_of_transformers(folder, size):
    processor = MllamaImages(read_checkpoint(folder), {})
    made = processor.prepare(picture(1, size), {})
    expected = theirs(folder).image_processor(picture(1, size), return_tensors="pt")
    for name in MllamaImages.tensors:
        assert torch.equal(made.tensors[name], expected[name])
    assert made.text == processor.text(size, {}) == TOKEN * 20


def test_a_processor_that_does_not_fit_the_tower(folder):
    checkpoint = read_checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"2 tiles of 28 pixels .* the tower reads 4 of 28"):
        MllamaImages(
            replace(checkpoint, preprocessor={**checkpoint.preprocessor, "max_image_tiles": 2}), {}
        )


A, X = 384, 7  # a picture, a word


@pytest.mark.parametrize(
    "ids",
    [
        [X, A, X, X],
        [A, X],
        [X, A],
        [X, A, X, A, X, X],
        [X, A, A, X, X],
        [A, A, X, A, X, A, A],
        [A, A, A],
        [X, A, X, A, A, X, X, A, X],
    ],
)
def test_each_token_sees_what_it_sees_in_transformers(rule, ids):
    items = [
        MediaInput(kind="image", tensors={}, num_tokens=20, key=str(i)) for i in range(ids.count(A))
    ]
    made = rule.divide(None, ids, items, len)
    length = len(ids)
    expected = [
        (first, None if end in (-1, length) else end)
        for first, end in get_cross_attention_token_mask(ids, A)
    ]
    assert [(view.first, view.end) for view in made.views] == expected
    assert (made.ids, made.items) == (tuple(ids), tuple(items))


def test_tiles_beyond_a_picture_are_not_seen(rule):
    mask = torch.tensor([[[1, 1, 0, 0]]])
    item = MediaInput(kind="image", tensors={"aspect_ratio_mask": mask}, num_tokens=20, key="a")
    assert rule.divide(None, [A], [item], len).views[0].num_tokens == 10


def test_a_prompt_with_another_number_of_places(rule):
    with pytest.raises(MediaError, match=r"2 <\|image\|> for 0 images"):
        rule.divide(None, [A, A], (), len)
    with pytest.raises(RequestError, match="no tokens"):
        rule.divide(None, (), (), len)


ITEM = 20 * 2 * 2 * 2 * 16 * 4  # bytes of a picture's keys and values
SAMPLING = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


class TestAnswers(EncoderAnswersInAllSettings):
    prompts = (
        (f"{TOKEN}The picture:", (0,)),
        ("How many circles", ()),
        (f"The {TOKEN} and {TOKEN}{TOKEN} quick brown fox", (1, 2, 0)),
        (f"{TOKEN}The picture:", (3,)),
        (f"The quick brown fox jumps over the lazy dog. {TOKEN} Describe", (0,)),
        (f"{TOKEN}The picture:", (0,)),
    )
    num_different = 5
    num_tokens = 20
    sizes = SIZES
    tight = (7, 64)
    few = 3 * ITEM

    @classmethod
    def reference(cls, folder):
        processor = theirs(folder)
        model = transformers.MllamaForConditionalGeneration.from_pretrained(folder).eval()
        # Its processor writes the first token; the tokenizer would write another.
        options = {"add_special_tokens": False, "return_tensors": "pt"}
        return model, lambda text, pictures: processor(
            text=text, images=pictures or None, **options
        )

    def prompt(self, text, pictures, ids):
        return {"prompt_token_ids": ids, "multimodal_data": {"image": pictures}}


def test_tokens_are_counted_and_a_missing_picture_is_refused(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = f"{TOKEN}The picture:"
    with LLM(str(folder), dtype="float32", use_warmup=False, kv_cache_memory=2**22) as llm:
        count = llm.count_tokens({"prompt": text, "multimodal_data": {"image": picture(0)}})
        ids = tokenizer(text)["input_ids"]
        assert (count.num_prompt_tokens, count.num_input_image_tokens) == (len(ids), 20)
        assert llm.generate({"prompt": text}, SAMPLING)[0].error_code == 400


def test_a_picture_that_a_user_writes_is_no_picture(folder):
    parts = [{"type": "text", "text": f"a {TOKEN} "}, {"type": "image", "image": picture(0)}]
    options = {"kv_cache_memory": 2**22, "use_warmup": False}
    with LLM(str(folder), dtype="float32", **options) as llm:
        (found,) = llm.chat([{"role": "user", "content": parts}], SAMPLING)
        assert found.is_ok, found.error_msg
        assert found.prompt_token_ids.count(A) == 1
        beyond = {"repetition_penalty": 1.2, "logit_bias": {A: 5.0}, "prompt_logprobs": 0}
        penalty = SamplingParams(temperature=0, max_tokens=4, **beyond)
        (found,) = llm.chat([{"role": "user", "content": parts}], penalty)
        assert found.is_ok, found.error_msg
        missing = [at for at, entry in enumerate(found.prompt_logprobs) if entry is None]
        assert missing == [0, found.prompt_token_ids.index(A)], "the head has no logit of a picture"
