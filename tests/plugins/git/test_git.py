"""GIT against transformers: the model with the checks of every family, its images and whole
answers, with pictures and without."""

import pytest
import torch
import transformers
from mmdeploy_llm_plugins import git
from mmdeploy_llm_plugins.git.image import GitImages, num_cells
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.testing import MediaProcessorConformance, ModelConformance
from mmdeploy_llm.weights.folder import read_checkpoint
from tests.plugins.pictures import picture

(SPEC,) = git.provide_models()
(IMAGES,) = git.provide_media_processors()


@pytest.mark.full
class TestModel(ModelConformance):
    spec = SPEC
    family = "git"


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


PROMPTS = [(" ", 0), (" ", 1), ("The quick", 2), ("The quick brown", None), (" ", 0)]
COUNT = 30
SAMPLING = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
TIGHT = {"num_gpu_blocks_override": 5, "block_size": 16, "max_model_len": 64}


@pytest.fixture(scope="module")
def expected(folder):
    images = CLIPImageProcessorPil.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.GitForCausalLM.from_pretrained(folder).eval()
    found = []
    for text, seed in PROMPTS:
        words = tokenizer(text.strip(), add_special_tokens=False)["input_ids"]
        made = {} if seed is None else dict(images(picture(seed), return_tensors="pt"))
        out = model.generate(
            **made,
            input_ids=torch.tensor([[model.config.bos_token_id, *words]]),
            max_new_tokens=COUNT,
            eos_token_id=None,
            do_sample=False,
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
        text if seed is None else {"prompt": text, "multimodal_data": {"image": picture(seed)}}
        for text, seed in PROMPTS
    ]
    options = {"kv_cache_memory": 2**22, **options}
    with LLM(str(folder), dtype="float32", use_warmup=False, **options) as llm:
        for _ in range(2):  # the second time with prefixes that are cached
            outputs = llm.generate(prompts, SAMPLING)
            found = [[*out.prompt_token_ids, *out.outputs.token_ids] for out in outputs]
            assert found == expected, [out.error_msg for out in outputs]
    assert len({tuple(ids) for ids in expected}) == 4, "the pictures are seen"
