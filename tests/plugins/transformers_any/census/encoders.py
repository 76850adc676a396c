"""Checkpoints and prompts of classes whose decoder attends to an encoder. Each has a plugin, whose
small checkpoint is taken; every prompt has one image."""

import torch
import transformers
from images import pictures
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from mmdeploy_llm.tiny import write_tiny

REASON = "each prompt must have an image"
FAMILIES = {
    "Florence2ForConditionalGeneration": ("florence2", ("<CAPTION>", "<OD>")),
    "VisionEncoderDecoderModel": ("vision_encoder_decoder", (" ", "The quick")),
}


def write(name, folder):
    """Writes the checkpoint. Returns our prompts, and the same for transformers' generate."""
    family, texts = FAMILIES[name]
    write_tiny(family, folder, dtype=torch.float32)
    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompts = [
        {"prompt": text, "multimodal_data": {"image": [image]}}
        for text, image in zip(texts, pictures(), strict=True)
    ]
    inputs = INPUTS[name]
    return prompts, [inputs(images, tokenizer, prompt) for prompt in prompts]


def _florence(images, tokenizer, prompt):
    processor = transformers.Florence2Processor(image_processor=images, tokenizer=tokenizer)
    image = prompt["multimodal_data"]["image"]
    return dict(processor(text=prompt["prompt"], images=image, return_tensors="pt"))


def _pictured(images, tokenizer, prompt):
    made = {"pixel_values": images(prompt["multimodal_data"]["image"], return_tensors="pt")}
    made["pixel_values"] = made["pixel_values"]["pixel_values"]
    if prompt["prompt"].strip():
        ids = tokenizer(prompt["prompt"], add_special_tokens=False, return_tensors="pt")
        made["decoder_input_ids"] = ids["input_ids"]
    return made


INPUTS = {
    "Florence2ForConditionalGeneration": _florence,
    "VisionEncoderDecoderModel": _pictured,
}
