"""Writes checkpoints with random weights for encoders.py, of models that read pictures: Pix2Struct
base, GIT base, and Kosmos-2.5 with a quarter of its layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PATCHES = 1024  # of a picture of Kosmos-2.5, which reads 4096 as published


def write_pix2struct(folder: Path) -> None:
    """Writes a checkpoint of Pix2Struct base's shape: 2048 patches."""
    from transformers import Pix2StructConfig, Pix2StructForConditionalGeneration

    words, ids = _words()
    text = {**ids, "vocab_size": 50244, "decoder_start_token_id": ids["pad_token_id"]}
    config = Pix2StructConfig(text_config=text, tie_word_embeddings=False)
    model = Pix2StructForConditionalGeneration(config)
    model.generation_config.decoder_start_token_id = ids["pad_token_id"]
    files = _patches("Pix2StructImageProcessor", 2048) | {"is_vqa": False}
    _save(folder, model, words, files)


def write_git(folder: Path) -> None:
    """Writes a checkpoint of GIT base's shape: 197 tokens of a picture."""
    from transformers import GitConfig, GitForCausalLM

    words, ids = _words()
    files = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 224},
        "crop_size": {"height": 224, "width": 224},
    }
    _save(folder, GitForCausalLM(GitConfig(**ids)), words, files)


def write_kosmos(folder: Path) -> None:
    """Writes a checkpoint of Kosmos-2.5's widths, with 6 layers in decoder and tower."""
    from transformers import Kosmos2_5Config, Kosmos2_5ForConditionalGeneration

    words, ids = _words("<image>", "</image>", "<ocr>", "<md>")
    words.init_kwargs |= {"image_token": "<s>", "boi_token": "<image>", "eoi_token": "</image>"}
    config = Kosmos2_5Config(
        text_config={**ids, "layers": 6}, vision_config={"num_hidden_layers": 6}
    )
    model = Kosmos2_5ForConditionalGeneration(config)
    _save(folder, model, words, _patches("Kosmos2_5ImageProcessor", PATCHES))


def _words(*tokens: str) -> tuple[Any, dict[str, int]]:
    """Returns a tokenizer, and the tokens that begin, end and fill a text."""
    from checkpoints import tokenizer

    words = tokenizer()
    words.add_tokens([*tokens, "</s>"], special_tokens=True)
    end = words.convert_tokens_to_ids("</s>")
    return words, {
        "bos_token_id": words.bos_token_id,
        "eos_token_id": end,
        "pad_token_id": words.pad_token_id,
    }


def _patches(name: str, most: int) -> dict[str, Any]:
    side = {"height": 16, "width": 16}
    fields = {"do_convert_rgb": True, "do_normalize": True, "patch_size": side}
    return {"image_processor_type": name, "max_patches": most, **fields}


def _save(folder: Path, model: Any, words: Any, files: dict[str, Any]) -> None:
    model.bfloat16().save_pretrained(folder)
    words.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(files))
