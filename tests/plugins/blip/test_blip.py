"""BLIP against transformers: the model with the checks of every family, its images and whole
answers."""

import json

import pytest
import transformers
from mmdeploy_llm_plugins import blip
from mmdeploy_llm_plugins.blip.image import BlipImages, num_cells

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.testing import CheckSkipped, MediaProcessorConformance, ModelConformance
from mmdeploy_llm.weights.folder import read_checkpoint
from tests.plugins.pictures import picture

(SPEC,) = blip.provide_models()
(IMAGES,) = blip.provide_media_processors()
PROMPTS = [("", 0), ("a picture", 1), ("The quick", 2), ("", 3), ("", 0)]
SAMPLING = SamplingParams(temperature=0, max_tokens=24)
TIGHT = {"num_gpu_blocks_override": 3, "block_size": 16, "max_model_len": 45}
IN_CHUNKS = {"max_num_batched_tokens": 3, "max_num_seqs": 3}


@pytest.mark.full
class TestModel(ModelConformance):
    spec = SPEC

    @staticmethod
    def chat_reference(folder, messages, num_tokens):
        raise CheckSkipped("a prompt begins a caption; there are no conversations")


@pytest.mark.full
class TestImages(MediaProcessorConformance):
    spec = IMAGES
    other_options = {"do_normalize": False}  # noqa: RUF012 - never written to


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request, tiny_folder):
    return tiny_folder("blip", tie_word_embeddings=request.param)


def answer(model, images, tokenizer, text, seed):
    """Returns the answer of transformers' generate, which reads a text as its processor frames it:
    a token before it, which becomes the first one of captions, and [SEP] after it."""
    own = model.config.text_config
    pixels = images(picture(seed), return_tensors="pt")["pixel_values"]
    words = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = [[own.bos_token_id, *words, own.sep_token_id]]
    ids = transformers.BatchEncoding({"ids": ids}, tensor_type="pt")["ids"]
    return model.generate(pixel_values=pixels, input_ids=ids, max_new_tokens=24, do_sample=False)


@pytest.fixture(scope="module")
def expected(folder):
    images = transformers.BlipImageProcessorPil.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.BlipForConditionalGeneration.from_pretrained(folder).eval()
    return [answer(model, images, tokenizer, *prompt)[0].tolist() for prompt in PROMPTS]


def asked(text, seed):
    return {"prompt": text or " ", "multimodal_data": {"image": picture(seed)}}


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, TIGHT, IN_CHUNKS])
def test_answers_equal_those_of_transformers(folder, expected, options):
    prompts = [asked(*prompt) for prompt in PROMPTS]
    options = {"kv_cache_memory": 2**22, **options}
    with LLM(str(folder), dtype="float32", use_warmup=False, **options) as llm:
        outputs = llm.generate(prompts, SAMPLING)
        found = [[*out.prompt_token_ids, *out.outputs.token_ids] for out in outputs]
        assert found == expected
        again = [
            [*o.prompt_token_ids, *o.outputs.token_ids] for o in llm.generate(prompts, SAMPLING)
        ]
        assert again == expected, "with prefixes and pictures from the caches"
    assert len({tuple(ids) for ids in expected}) == 4, "the pictures are seen"


@pytest.mark.full
def test_an_answer_ends_at_the_separator(tiny_copy, tmp_path):
    """A checkpoint's files may name another token as the end, as those of BLIP do."""
    folder = tiny_copy("blip", tmp_path, tie_word_embeddings=False)
    with LLM(str(folder), dtype="float32", use_warmup=False, kv_cache_memory=2**22) as llm:
        (whole,) = llm.generate([asked("", 0)], SAMPLING)
    ids = list(whole.outputs.token_ids)
    end = ids[3]
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["sep_token_id"] = end
    path.write_text(json.dumps(config))
    with LLM(str(folder), dtype="float32", use_warmup=False, kv_cache_memory=2**22) as llm:
        found = llm.generate(
            [asked("", 0)] * 2, [SAMPLING, SAMPLING.model_copy(update={"ignore_eos": True})]
        )
    assert list(found[0].outputs.token_ids) == ids[: ids.index(end) + 1]
    assert found[0].outputs.finish_reason == "stop"
    assert list(found[1].outputs.token_ids) == ids


def test_pictures_and_their_length(tiny_folder):
    folder = tiny_folder("blip")
    checkpoint = read_checkpoint(folder)
    processor = BlipImages(checkpoint, {})
    made = processor.prepare(picture(1), {})
    theirs = transformers.BlipImageProcessorPil.from_pretrained(folder)
    assert (
        made.tensors["pixel_values"] == theirs(picture(1), return_tensors="pt")["pixel_values"]
    ).all()
    assert made.text == processor.token * num_cells(checkpoint.config.vision_config)
    checkpoint.config.vision_config.image_size = 64
    with pytest.raises(CheckpointError, match="32 x 32 pixels, but the tower reads 64 x 64"):
        BlipImages(checkpoint, {})
