"""Gemma 3 with images from end to end: chats against transformers' model and processor."""

import pytest
import torch
import transformers
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

from mmdeploy_llm.testing.tiny import write_tiny

from .image_chats import check_chats, check_ids, check_refused, new_tokens, noise

PAN = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny("gemma3", tmp_path_factory.mktemp("gemma3"))


GROUPS = [
    [],
    [noise(0, 55, 50)],
    [noise(1, 300, 90)],
    [noise(2, 40, 200), noise(3, 50, 50)],
]


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
        return new_tokens(model, inputs)


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, PAN], ids=["squares", "pan and scan"])
@pytest.mark.parametrize("budget", [512, 60], ids=["whole", "in chunks"])
def test_chats_equal_transformers(budget, options, folder):
    outputs = check_chats(folder, GROUPS, expected, budget, options)
    assert [output.num_input_image_tokens for output in outputs[:2]] == [0, 4]
    assert outputs[2].num_input_image_tokens == (16 if options else 4)


def test_ids_that_transformers_processor_made(folder):
    check_ids(folder, GROUPS[3], expected)


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
    check_refused(folder, tmp_path, part, name, value)
