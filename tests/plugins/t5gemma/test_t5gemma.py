"""T5Gemma 2 against transformers: the model with the checks of every family, and whole answers to
texts and pictures."""

import pytest
import transformers
from mmdeploy_llm_plugins import t5gemma
from mmdeploy_llm_plugins.gemma.tiny3 import START
from mmdeploy_llm_plugins.t5gemma.prompts import T5GemmaPrompts
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

from mmdeploy_llm import LLM
from mmdeploy_llm.errors import MediaError, RequestError
from mmdeploy_llm.testing import ModelConformance
from mmdeploy_llm.weights.folder import read_checkpoint
from tests.plugins.encoder_answers import EncoderAnswers
from tests.plugins.pictures import picture

(SPEC,) = t5gemma.provide_models()


@pytest.mark.full
class TestModel(ModelConformance):
    spec = SPEC


@pytest.fixture(scope="module")
def folder(tiny_folder):
    return tiny_folder("t5gemma2")


def test_a_prompt_with_another_number_of_places(folder):
    rule = T5GemmaPrompts(read_checkpoint(folder))
    with pytest.raises(RequestError, match="no tokens"):
        rule.divide("", (), (), len)
    with pytest.raises(MediaError, match=f"1 {START} for 0 images; write one for each"):
        rule.divide(f"a {START}", (7,), (), len)
    soft = rule._image_id
    with pytest.raises(MediaError, match=f"2 tokens for images.*write {START}"):
        rule.divide(None, (soft, soft), (), len)


@pytest.mark.full
class TestAnswers(EncoderAnswers):
    prompts = (
        ("The quick brown fox", ()),
        (f"Describe {START} the picture", (0,)),
        (f"{START}{START} jumps over", (1, 2)),
        (f"Describe {START} the picture", (3,)),
        ("The quick brown fox", ()),
        ("A red circle and a blue square on a white background", ()),
    )
    num_different = 5
    repetition_penalty = 20.0

    @classmethod
    def reference(cls, folder):
        processor = Gemma3Processor(
            image_processor=Gemma3ImageProcessorPil.from_pretrained(folder),
            tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
            image_seq_length=4,
        )
        model = transformers.T5Gemma2ForConditionalGeneration.from_pretrained(folder).eval()

        def inputs(text, pictures):
            made = processor(text=text, images=pictures or None, return_tensors="pt")
            made.pop("token_type_ids", None)
            return made

        return model, inputs


def test_tokens_of_pictures_and_words(folder):
    text = f"Describe {START} the picture and {START}"
    options = {"kv_cache_memory": 2**22, "limit_mm_per_prompt": {"image": 2}, "use_warmup": False}
    with LLM(str(folder), dtype="float32", **options) as llm:
        pictures = {"image": [picture(0), picture(1)]}
        count = llm.count_tokens({"prompt": text, "multimodal_data": pictures})
    assert count.num_input_image_tokens == 8
    assert count.num_input_tokens_by_kind["text"] > 0, "words of the prompt are no picture's"
