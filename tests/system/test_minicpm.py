"""MiniCPM-V 4.6 from end to end: chats with images against transformers' model and processor."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (
    MiniCPMV4_6ImageProcessorPil,
)
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.testing.tiny import write_tiny
from mmdeploy_llm.testing.tiny.minicpm import TOKENS

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
OPTIONS = {
    "limit_mm_per_prompt": {"image": 4},
    "block_size": 16,
    "num_gpu_blocks_override": 128,
    "max_model_len": 768,
    "max_num_seqs": 8,
    "num_threads": 1,
    "use_warmup": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny("minicpmv4_6", tmp_path_factory.mktemp("minicpm"))


def picture(seed, width, height):
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


GROUPS = [
    [],
    [picture(0, 60, 50)],
    [picture(1, 300, 90)],
    [picture(2, 120, 200), picture(3, 50, 50)],
]


def chat(images):
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]


def processor_of(folder):
    """transformers' processor; its tokenizer names the tokens of images."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for name, text in {**TOKENS, "video_token": "<|video_pad|>"}.items():
        setattr(tokenizer, name, text)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(text))
    checked = {"check_argument_for_proper_class": lambda *_: None}
    return type("MiniCPMV4_6Processor", (MiniCPMV4_6Processor,), checked)(
        image_processor=MiniCPMV4_6ImageProcessorPil.from_pretrained(folder),
        video_processor=SimpleNamespace(slice_mode=True, downsample_mode="16x"),
        tokenizer=tokenizer,
    )


def expected(folder, prompt, images, **options):
    """Returns what transformers' processor and model make of a rendered chat: ids, new tokens."""
    architecture = transformers.MiniCPMV4_6ForConditionalGeneration
    model = architecture.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = processor_of(folder)(
        text=[prompt], images=[images] if images else None, return_tensors="pt", **options
    )
    mode = {"downsample_mode": options["downsample_mode"]} if options else {}
    with torch.inference_mode():
        settings = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None}
        found = model.generate(**inputs, **mode, **settings)
    ids = inputs["input_ids"][0].tolist()
    return ids, found[0, len(ids) :].tolist()


@pytest.mark.parametrize("options", [{}, {"downsample_mode": "4x"}], ids=["16x", "4x"])
@pytest.mark.parametrize("budget", [512, 40], ids=["whole", "in chunks"])
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
    found = [output.num_input_image_tokens for output in outputs[:2]]
    assert found == [0, 16 if options else 4]


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
        (None, "merger_times", 2),
        (None, "merge_kernel_size", [2, 4]),
        (None, "insert_layer_id", 3),
        ("vision_config", "window_kernel_size", [4, 4]),
        ("vision_config", "hidden_act", "softplus"),
        ("text_config", "model_type", "qwen3"),
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
