"""Gemma 3 with images from end to end: chats against transformers' model and processor."""

import json

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.testing.tiny import write_tiny

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
OPTIONS = {
    "limit_mm_per_prompt": {"image": 4},
    "block_size": 16,
    "num_gpu_blocks_override": 64,
    "max_model_len": 768,
    "max_num_seqs": 8,
    "num_threads": 1,
    "use_warmup": False,
}
PAN = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny("gemma3", tmp_path_factory.mktemp("gemma3"))


def picture(seed, width, height):
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


GROUPS = [
    [],
    [picture(0, 55, 50)],
    [picture(1, 300, 90)],
    [picture(2, 40, 200), picture(3, 50, 50)],
]


def chat(images):
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]


def expected(folder, prompt, images, **options):
    """Returns what transformers' processor and model make of a rendered chat: ids, new tokens."""
    architecture = transformers.Gemma3ForConditionalGeneration
    model = architecture.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    names = {"boi": "<start_of_image>", "eoi": "<end_of_image>", "image": "<image_soft_token>"}
    for name, text in names.items():
        setattr(tokenizer, f"{name}_token", text)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(text))
    checked = {"check_argument_for_proper_class": lambda *_: None}
    processor = type("Gemma3Processor", (Gemma3Processor,), checked)(
        image_processor=Gemma3ImageProcessorPil.from_pretrained(folder),
        tokenizer=tokenizer,
        image_seq_length=4,
    )
    inputs = processor(
        text=[prompt],
        images=[images] if images else None,
        return_tensors="pt",
        add_special_tokens=False,
        **options,
    )
    with torch.inference_mode():
        settings = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None}
        found = model.generate(**inputs, **settings)
    ids = inputs["input_ids"][0].tolist()
    return ids, found[0, len(ids) :].tolist()


@pytest.mark.parametrize("options", [{}, PAN], ids=["squares", "pan and scan"])
@pytest.mark.parametrize("budget", [512, 60], ids=["whole", "in chunks"])
def test_chats_equal_transformers(budget, options, folder):
    given = {"max_num_batched_tokens": budget, "mm_processor_kwargs": options}
    with LLM(str(folder), dtype="float32", **given, **OPTIONS) as llm:
        outputs = llm.chat([chat(images) for images in GROUPS], GREEDY, use_tqdm=False)
        again = llm.chat([chat(images) for images in GROUPS], GREEDY, use_tqdm=False)
        counts = [llm.count_tokens(chat(images)) for images in GROUPS]
    for output, repeated, count, images in zip(outputs, again, counts, GROUPS, strict=True):
        assert output.is_ok, output.error_msg
        ids, tokens = expected(folder, output.prompt, images, **options)
        assert list(output.prompt_token_ids) == ids
        assert list(output.outputs.token_ids) == list(repeated.outputs.token_ids) == tokens
        assert count.num_input_image_tokens == output.num_input_image_tokens
        assert not images or repeated.num_cached_tokens > 0
    assert [output.num_input_image_tokens for output in outputs[:2]] == [0, 4]
    assert outputs[2].num_input_image_tokens == (16 if options else 4)


def test_ids_that_transformers_processor_made(folder):
    with LLM(str(folder), dtype="float32", **OPTIONS) as llm:
        rendered = llm.chat(chat(GROUPS[3]), GREEDY, use_tqdm=False)[0]
        ids, tokens = expected(folder, rendered.prompt, GROUPS[3])
        prompt = {"prompt_token_ids": ids, "multimodal_data": {"image": GROUPS[3]}}
        output = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
    assert output.is_ok, output.error_msg
    assert list(output.prompt_token_ids) == ids
    assert list(output.outputs.token_ids) == tokens


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        (None, "mm_tokens_per_image", 9),
        (None, "mm_tokens_per_image", 16),
        (None, "image_token_index", 10**6),
        ("vision_config", "hidden_act", "softplus"),
        ("vision_config", "model_type", "clip_vision_model"),
        ("text_config", "hidden_activation", "silu"),
    ],
    ids=str,
)
def test_configs_that_are_refused(part, name, value, folder, tmp_path):
    for file in folder.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    (config[part] if part else config)[name] = value
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(ModelNotSupportedError, match="not supported"):
        LLM(str(tmp_path), load_format="dummy", **OPTIONS)
