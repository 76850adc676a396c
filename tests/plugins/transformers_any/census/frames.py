"""Checkpoint and prompts of a class whose only media are videos, of four frames each."""

import json

import numpy as np
import torch
import torch.nn.functional as F
from images import QUESTIONS, configs_in
from shrink import SIDE

from mmdeploy_llm.testing import tiny
from mmdeploy_llm.testing.checkpoint import write_checkpoint

NAME = "InstructBlipVideoForConditionalGeneration"
TOKEN = "<video>"
QUERIES, FRAMES = 3, 4
TEXTS = ("What is in it?", "Nothing.")
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


def write(config, folder):
    """Writes the checkpoint. Returns our prompts, and the same for transformers' generate."""
    tokenizer, questions = tiny.make_tokenizer(), tiny.make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [TOKEN]})
    own = tokenizer.convert_tokens_to_ids(TOKEN)
    for inner in configs_in(config):
        for field in ("video_token_id", "video_token_index"):
            if hasattr(inner, field):
                setattr(inner, field, own)
    config.num_query_tokens = QUERIES
    questions.save_pretrained(folder / QUESTIONS)
    write_checkpoint(config, folder, tokenizer=tokenizer)
    side = config.vision_config.image_size
    fields = {
        "image_processor_type": "InstructBlipVideoImageProcessor",
        "size": {"height": side, "width": side},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(fields))
    named = {"processor_class": "InstructBlipVideoProcessor", "num_query_tokens": QUERIES}
    (folder / "processor_config.json").write_text(json.dumps(named))
    prompts, inputs = [], []
    for seed, text in enumerate(TEXTS):
        frames = np.random.RandomState(seed).randint(
            0, 255, (FRAMES, 2 * SIDE, 3 * SIDE, 3), dtype=np.uint8
        )
        prompts.append({"prompt": f"{TOKEN}{text}", "multimodal_data": {"video": [frames]}})
        asked = questions([text], return_tensors="pt")
        ids = [own] * (QUERIES * FRAMES) + tokenizer(text)["input_ids"]
        inputs.append(
            {
                "pixel_values": _pixels(frames, side),
                "input_ids": torch.tensor([ids]),
                "qformer_input_ids": asked["input_ids"],
                "qformer_attention_mask": asked["attention_mask"],
            }
        )
    return prompts, inputs


def _pixels(frames, side):
    """Returns [1, frames, 3, side, side], as transformers makes them by torchvision."""
    pixels = torch.from_numpy(frames).permute(0, 3, 1, 2)
    small = F.interpolate(pixels, (side, side), mode="bicubic", antialias=True, align_corners=False)
    mean, std = (255 * torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return ((small.float() - mean) / std)[None]
