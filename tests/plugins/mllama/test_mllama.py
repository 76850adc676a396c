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
from tests.plugins.pictures import picture

(SPEC,) = mllama.provide_models()
(IMAGES,) = mllama.provide_media_processors()


@pytest.mark.full
class TestModel(ModelConformance):
    spec = SPEC
    family = "mllama"


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


PROMPTS = [
    (f"{TOKEN}The picture:", (0,)),
    ("How many circles", ()),
    (f"The {TOKEN} and {TOKEN}{TOKEN} quick brown fox", (1, 2, 0)),
    (f"{TOKEN}The picture:", (3,)),
    (f"The quick brown fox jumps over the lazy dog. {TOKEN} Describe", (0,)),
    (f"{TOKEN}The picture:", (0,)),
]
SAMPLING = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
TIGHT = {"num_gpu_blocks_override": 7, "block_size": 16, "max_model_len": 64}
ITEM = 20 * 2 * 2 * 2 * 16 * 4  # bytes of a picture's keys and values
FEW = {"encoder_cache_memory": 3 * ITEM}


@pytest.fixture(scope="module")
def expected(folder):
    """The prompts and answers of transformers, each alone."""
    processor = theirs(folder)
    model = transformers.MllamaForConditionalGeneration.from_pretrained(folder).eval()
    found = []
    for text, seeds in PROMPTS:
        images = [picture(seed, SIZES[seed]) for seed in seeds] or None
        # Its processor writes the first token; the tokenizer would write another.
        inputs = processor(text=text, images=images, add_special_tokens=False, return_tensors="pt")
        out = model.generate(**inputs, max_new_tokens=20, eos_token_id=None, do_sample=False)
        found.append(out[0].tolist())
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"native_kernels": False}, marks=pytest.mark.full),
        pytest.param({"max_num_batched_tokens": 3, "max_num_seqs": 3}, marks=pytest.mark.full),
        pytest.param(TIGHT, marks=pytest.mark.full, id="preempted"),
        pytest.param(FEW, marks=pytest.mark.full, id="few items at a time"),
    ],
)
def test_answers_equal_those_of_transformers(folder, expected, options):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompts = [
        {
            "prompt_token_ids": found[: len(found) - 20],
            "multimodal_data": {"image": [picture(seed, SIZES[seed]) for seed in seeds]},
        }
        for found, (_, seeds) in zip(expected, PROMPTS, strict=True)
    ]
    options = {"kv_cache_memory": 2**22, "limit_mm_per_prompt": {"image": 3}, **options}
    with LLM(str(folder), dtype="float32", use_warmup=False, **options) as llm:
        outputs = llm.generate(prompts, SAMPLING)
        assert [[*out.prompt_token_ids, *out.outputs.token_ids] for out in outputs] == expected
        again = llm.generate(prompts, SAMPLING)  # with prefixes that are cached
        assert [out.outputs.token_ids for out in again] == [
            out.outputs.token_ids for out in outputs
        ]
        one = {"prompt": PROMPTS[0][0], "multimodal_data": {"image": picture(0)}}
        count = llm.count_tokens(one)
        ids = tokenizer(PROMPTS[0][0])["input_ids"]
        assert (count.num_prompt_tokens, count.num_input_image_tokens) == (len(ids), 20)
        wrong = llm.generate({"prompt": f"{TOKEN} one"}, SAMPLING)[0]
        assert wrong.error_code == 400


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
