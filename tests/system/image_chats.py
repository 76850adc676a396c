"""Builds, by family, the inputs that transformers' processors make of chats with images."""

from types import SimpleNamespace

import numpy as np
import transformers
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (
    MiniCPMV4_6ImageProcessorPil,
)
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor

GEMMA3_TOKENS = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
MINICPM_TOKENS = {
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "image_token": "<|image_pad|>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
    "video_token": "<|video_pad|>",
}
INTERNVL_TILE = 4  # tokens


def noise(seed, width, height):
    """A picture in which no pixel is as its neighbour."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def chat(media):
    parts = [{"type": kind, kind: item} for kind, item in media]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]


def named(folder, tokens):
    """transformers' tokenizer, which names the tokens of images."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for name, text in tokens.items():
        setattr(tokenizer, name, text)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(text))
    return tokenizer


def unchecked(processor, **parts):
    """transformers' processor, which would check the classes of its parts."""
    checked = {"check_argument_for_proper_class": lambda *_: None}
    return type(processor.__name__, (processor,), checked)(**parts)


def written_out(prompt, marker, texts):
    """The prompt with the i-th marker replaced by the i-th text."""
    first, *rest = prompt.split(marker)
    return first + "".join(text + part for text, part in zip(texts, rest, strict=True))


def of_ids(folder, prompt):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    made = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    return {name: made[name] for name in ("input_ids", "attention_mask")}


def gemma3(folder, prompt, images, **options):
    processor = unchecked(
        Gemma3Processor,
        image_processor=Gemma3ImageProcessorPil.from_pretrained(folder),
        tokenizer=named(folder, GEMMA3_TOKENS),
        image_seq_length=4,
    )
    given = {"return_tensors": "pt", "add_special_tokens": False, **options}
    return dict(processor(text=[prompt], images=[images] if images else None, **given))


def gemma4(folder, prompt, images):
    inputs = {}
    if images:
        made = Gemma4ImageProcessorPil.from_pretrained(folder)(images, return_tensors="pt")
        inputs = {name: made[name] for name in ("pixel_values", "image_position_ids")}
        counts = made["num_soft_tokens_per_image"]
        texts = [f"<|image>{'<|image|>' * int(count)}<image|>" for count in counts]
        prompt = written_out(prompt, "<|image|>", texts)
    inputs |= of_ids(folder, prompt)
    image = transformers.AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<|image|>")
    return {**inputs, "mm_token_type_ids": (inputs["input_ids"] == image).long()}


def internvl(folder, prompt, images):
    inputs = {}
    if images:
        processor = GotOcr2ImageProcessorPil.from_pretrained(folder, crop_to_patches=True)
        made = processor(images, return_tensors="pt")
        inputs["pixel_values"] = made["pixel_values"]
        counts = [INTERNVL_TILE * num_tiles for num_tiles in made["num_patches"].tolist()]
        texts = [f"<img>{'<IMG_CONTEXT>' * count}</img>" for count in counts]
        prompt = written_out(prompt, "<IMG_CONTEXT>", texts)
    return {**inputs, **of_ids(folder, prompt)}


def minicpm(folder, prompt, images, **options):
    processor = unchecked(
        MiniCPMV4_6Processor,
        image_processor=MiniCPMV4_6ImageProcessorPil.from_pretrained(folder),
        video_processor=SimpleNamespace(slice_mode=True, downsample_mode="16x"),
        tokenizer=named(folder, MINICPM_TOKENS),
    )
    images = [images] if images else None
    return {**processor(text=[prompt], images=images, return_tensors="pt", **options), **options}


INPUTS = {"gemma3": gemma3, "gemma4": gemma4, "internvl": internvl, "minicpmv4_6": minicpm}
