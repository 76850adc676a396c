"""T5Gemma 2 against transformers: the model with the checks of every family, and whole answers to
texts and pictures."""

import pytest
import transformers
from mmdeploy_llm_plugins import t5gemma
from mmdeploy_llm_plugins.gemma.tiny3 import START
from mmdeploy_llm_plugins.t5gemma.prompts import T5GemmaPrompts
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.errors import MediaError, RequestError
from mmdeploy_llm.testing import ModelConformance
from mmdeploy_llm.weights.folder import read_checkpoint
from tests.plugins.pictures import picture

(SPEC,) = t5gemma.provide_models()


@pytest.mark.full
class TestModel(ModelConformance):
    spec = SPEC
    family = "t5gemma2"


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


PROMPTS = [
    ("The quick brown fox", ()),
    (f"Describe {START} the picture", (0,)),
    (f"{START}{START} jumps over", (1, 2)),
    (f"Describe {START} the picture", (3,)),
    ("The quick brown fox", ()),
    ("A red circle and a blue square on a white background", ()),
]
PENALTY = 20.0  # tied embeddings would repeat the first token for ever
SAMPLING = SamplingParams(temperature=0, repetition_penalty=PENALTY, max_tokens=24, ignore_eos=True)
TIGHT = {"num_gpu_blocks_override": 3, "block_size": 16, "max_model_len": 40}


@pytest.fixture(scope="module")
def expected(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processor = Gemma3Processor(
        image_processor=Gemma3ImageProcessorPil.from_pretrained(folder),
        tokenizer=tokenizer,
        image_seq_length=4,
    )
    model = transformers.T5Gemma2ForConditionalGeneration.from_pretrained(folder).eval()
    found = []
    for text, seeds in PROMPTS:
        images = [picture(seed) for seed in seeds] or None
        inputs = processor(text=text, images=images, return_tensors="pt")
        inputs.pop("token_type_ids", None)
        out = model.generate(
            **inputs,
            max_new_tokens=24,
            eos_token_id=None,
            do_sample=False,
            repetition_penalty=PENALTY,
        )
        found.append(out[0].tolist())
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"native_kernels": False}, marks=pytest.mark.full),
        pytest.param({"max_num_batched_tokens": 3, "max_num_seqs": 3}, marks=pytest.mark.full),
        pytest.param(TIGHT, marks=pytest.mark.full, id="preempted"),
    ],
)
def test_answers_equal_those_of_transformers(folder, expected, options):
    prompts = [
        {"prompt": text, "multimodal_data": {"image": [picture(seed) for seed in seeds]}}
        if seeds
        else text
        for text, seeds in PROMPTS
    ]
    options = {"kv_cache_memory": 2**22, "limit_mm_per_prompt": {"image": 2}, **options}
    with LLM(str(folder), dtype="float32", use_warmup=False, **options) as llm:
        outputs = llm.generate(prompts, SAMPLING)
        found = [[*out.prompt_token_ids, *out.outputs.token_ids] for out in outputs]
        assert found == expected, [out.error_msg for out in outputs]
        for prompt, out in zip(prompts, outputs, strict=True):
            counts = out.num_input_tokens_by_kind
            assert counts == llm.count_tokens(prompt).num_input_tokens_by_kind
            images = [] if isinstance(prompt, str) else prompt["multimodal_data"]["image"]
            assert out.num_input_image_tokens == 4 * len(images), "words of the prompt are none"
            assert counts["text"] > 0
    assert len({tuple(ids) for ids in expected}) == 5, "texts and pictures are read"
