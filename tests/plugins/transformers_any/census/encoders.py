"""Checkpoints and prompts of classes with an encoder of images that only their plugins know, whose
small checkpoint is taken; every prompt has one image."""

import torch
import transformers
from images import pictures
from mmdeploy_llm_plugins.gemma.tiny3 import START
from mmdeploy_llm_plugins.kosmos.tiny import NUM_TOKENS
from mmdeploy_llm_plugins.mllama.tiny import TOKEN as TILES
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from mmdeploy_llm.testing.tiny import write_tiny

REASON = "each prompt must have an image"
FAMILIES = {
    "BlipForConditionalGeneration": ("blip", (" ", "The quick")),
    "Florence2ForConditionalGeneration": ("florence2", ("<CAPTION>", "<OD>")),
    "GitForCausalLM": ("git", (" ", "The quick")),
    "Kosmos2_5ForConditionalGeneration": ("kosmos2_5", ("<image><ocr>", "<image><md>The")),
    "MllamaForConditionalGeneration": ("mllama", (f"{TILES}What is it?", f"See {TILES}.")),
    "PPFormulaNetForConditionalGeneration": ("pp_formulanet", (" ", "The quick")),
    "Pix2StructForConditionalGeneration": ("pix2struct", (" ", "The quick")),
    "T5Gemma2ForConditionalGeneration": ("t5gemma2", (f"See {START} it", f"{START} jumps")),
    "VisionEncoderDecoderModel": ("vision_encoder_decoder", (" ", "The quick")),
}
# Whose encoder reads texts too, from a checkpoint that says how the decoder begins.
TEXTS = {"T5Gemma2ForConditionalGeneration": ("The quick brown fox", "How many are there?", "a")}
BEGUN = ("MllamaForConditionalGeneration",)  # its processor begins the text, not its tokenizer
OWN_ENDS = ("BlipForConditionalGeneration",)  # its generate ends at a token of its own
NEED_AN_IMAGE = (
    "BlipForConditionalGeneration",
    "Florence2ForConditionalGeneration",
    "PPFormulaNetForConditionalGeneration",
    "Pix2StructForConditionalGeneration",
    "VisionEncoderDecoderModel",
)


def write(name, folder):
    """Writes the checkpoint. Returns our prompts, and the same for transformers' generate."""
    family, texts = FAMILIES[name]
    write_tiny(family, folder, dtype=torch.float32)
    kind = IMAGES.get(name)
    if kind is None:
        images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    else:
        images = kind.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompts = [
        {"prompt": text, "multimodal_data": {"image": [image]}}
        for text, image in zip(texts, pictures(), strict=True)
    ]
    inputs = [INPUTS[name](images, tokenizer, prompt) for prompt in prompts]
    if name in BEGUN:
        for prompt, own in zip(prompts, inputs, strict=True):
            del prompt["prompt"]
            prompt["prompt_token_ids"] = own["input_ids"][0].tolist()
    return prompts, inputs


def _florence(images, tokenizer, prompt):
    processor = transformers.Florence2Processor(image_processor=images, tokenizer=tokenizer)
    image = prompt["multimodal_data"]["image"]
    return dict(processor(text=prompt["prompt"], images=image, return_tensors="pt"))


def write_texts(name, folder):
    """Writes the checkpoint of a class of TEXTS. Returns what `write` does, without images."""
    write_tiny(FAMILIES[name][0], folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = [dict(tokenizer(text, return_tensors="pt")) for text in TEXTS[name]]
    for own in inputs:
        own.pop("token_type_ids", None)
    return [{"prompt": text} for text in TEXTS[name]], inputs


def _captioned(images, tokenizer, prompt):
    made = images(prompt["multimodal_data"]["image"], return_tensors="pt")
    words = tokenizer(prompt["prompt"].strip(), add_special_tokens=False)["input_ids"]
    ids = torch.tensor([[tokenizer.bos_token_id, *words, tokenizer.eos_token_id]])
    return {"pixel_values": made["pixel_values"], "input_ids": ids}


def _pictured(images, tokenizer, prompt):
    made = {"pixel_values": images(prompt["multimodal_data"]["image"], return_tensors="pt")}
    made["pixel_values"] = made["pixel_values"]["pixel_values"]
    if prompt["prompt"].strip():
        ids = tokenizer(prompt["prompt"], add_special_tokens=False, return_tensors="pt")
        made["decoder_input_ids"] = ids["input_ids"]
    return made


def _formula(images, tokenizer, prompt):
    words = tokenizer(prompt["prompt"].strip(), add_special_tokens=False)["input_ids"]
    made = images(prompt["multimodal_data"]["image"], return_tensors="pt")
    ids = torch.tensor([[tokenizer.eos_token_id, *words]])
    return {"pixel_values": made["pixel_values"], "decoder_input_ids": ids}


def _git(images, tokenizer, prompt):
    words = tokenizer(prompt["prompt"].strip(), add_special_tokens=False)["input_ids"]
    made = images(prompt["multimodal_data"]["image"], return_tensors="pt")
    return {**made, "input_ids": torch.tensor([[tokenizer.bos_token_id, *words]])}


def _patches(images, tokenizer, prompt):
    words = tokenizer(prompt["prompt"].strip(), add_special_tokens=False)["input_ids"]
    made = images(prompt["multimodal_data"]["image"], return_tensors="pt")
    return {**made, "decoder_input_ids": torch.tensor([[tokenizer.pad_token_id, *words]])}


def _kosmos(images, tokenizer, prompt):
    processor = transformers.Kosmos2_5Processor(images, tokenizer, num_image_tokens=NUM_TOKENS)
    text = prompt["prompt"].removeprefix("<image>")
    image = prompt["multimodal_data"]["image"]
    made = dict(processor(text=text, images=image, max_patches=images.max_patches))
    return {name: made[name] for name in made if name not in ("width", "height")}


def _processed(processor):
    def inputs(images, tokenizer, prompt):
        made = processor(images, tokenizer)
        given = {"text": prompt["prompt"], "images": prompt["multimodal_data"]["image"]}
        special = not isinstance(made, transformers.MllamaProcessor)  # it writes the first token
        found = dict(made(**given, add_special_tokens=special, return_tensors="pt"))
        found.pop("token_type_ids", None)
        return found

    return inputs


def _gemma(images, tokenizer):
    return transformers.Gemma3Processor(images, tokenizer, image_seq_length=4)


IMAGES = {
    "Kosmos2_5ForConditionalGeneration": transformers.Kosmos2_5ImageProcessorPil,
    "MllamaForConditionalGeneration": transformers.MllamaImageProcessorPil,
    "PPFormulaNetForConditionalGeneration": transformers.NougatImageProcessorPil,
    "Pix2StructForConditionalGeneration": transformers.Pix2StructImageProcessorPil,
    "T5Gemma2ForConditionalGeneration": transformers.Gemma3ImageProcessorPil,
}
INPUTS = {
    "BlipForConditionalGeneration": _captioned,
    "Florence2ForConditionalGeneration": _florence,
    "GitForCausalLM": _git,
    "Kosmos2_5ForConditionalGeneration": _kosmos,
    "MllamaForConditionalGeneration": _processed(transformers.MllamaProcessor),
    "PPFormulaNetForConditionalGeneration": _formula,
    "Pix2StructForConditionalGeneration": _patches,
    "T5Gemma2ForConditionalGeneration": _processed(_gemma),
    "VisionEncoderDecoderModel": _pictured,
}
