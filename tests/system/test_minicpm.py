"""MiniCPM-V 4.6 from end to end: chats with images against transformers' model and processor."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from mmdeploy_llm_plugins.minicpm.tiny import TOKENS
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (
    MiniCPMV4_6ImageProcessorPil,
)
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor

from mmdeploy_llm.testing.tiny import write_tiny

from .image_chats import check_chats, check_ids, check_refused, new_tokens, noise


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny("minicpmv4_6", tmp_path_factory.mktemp("minicpm"))


GROUPS = [
    [],
    [noise(0, 60, 50)],
    [noise(1, 300, 90)],
    [noise(2, 120, 200), noise(3, 50, 50)],
]


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
        return new_tokens(model, inputs, **mode)


@pytest.mark.parametrize("options", [{}, {"downsample_mode": "4x"}], ids=["16x", "4x"])
@pytest.mark.parametrize("budget", [512, 40], ids=["whole", "in chunks"])
def test_chats_equal_transformers(budget, options, folder):
    outputs = check_chats(folder, GROUPS, expected, budget, options)
    found = [output.num_input_image_tokens for output in outputs[:2]]
    assert found == [0, 16 if options else 4]


def test_ids_that_transformers_processor_made(folder):
    check_ids(folder, GROUPS[3], expected)


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
    check_refused(folder, tmp_path, part, name, value)
