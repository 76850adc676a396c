"""Tiny checkpoints of models of two towers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from mmdeploy_llm.hooks import MediaSpan
from mmdeploy_llm.testing.tiny import VOCAB_SIZE, Family, MediaForm

SIDE, PATCH = 32, 8  # pixels of an image and of a patch
SIZES: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MEAN = [0.5, 0.5, 0.5]
FRAMES = ("<s>:0 $A:0 </s>:0", "<s>:0 $A:0 </s>:0 $B:0 </s>:0")
END_ONLY = ("$A:0 </s>:0", "$A:0 </s>:0 $B:0 </s>:0")


def _config(architecture: str, tokenizer: Any, options: Mapping[str, Any], **vision: Any) -> Any:
    text = {
        **SIZES,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 40,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        **options,
    }
    found = getattr(transformers, architecture).config_class
    tower = {**SIZES, "hidden_size": 64, "num_channels": 3, "patch_size": PATCH, **vision}
    return found(text_config=text, vision_config=tower)


def _clip(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    config = _config("CLIPModel", tokenizer, options, image_size=SIDE, hidden_size=48)
    config.projection_dim = 40
    return config


def _siglip(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    return _config("SiglipModel", tokenizer, options, image_size=SIDE)


def _siglip2(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    return _config("Siglip2Model", tokenizer, options, num_patches=16, patch_size=16)


def _tipsv2(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    vision = {"image_size": SIDE, "mlp_ratio": 1.5, "num_register_tokens": 2}
    return _config("Tipsv2Model", tokenizer, options, layerscale_value=0.5, **vision)


def _inputs(config: Any, ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
    """Returns the tensors of all images; where they have any shape, which rows are padding."""
    names = media[0].item.tensors
    found = {name: torch.cat([span.item.tensors[name] for span in media]) for name in names}
    if "spatial_shapes" in found:
        rows = torch.arange(found["pixel_values"].shape[1])
        found["pixel_attention_mask"] = (rows < found["spatial_shapes"].prod(1, True)).int()
    return found


def _preprocessor(kind: str, **fields: Any) -> dict[str, dict[str, Any]]:
    own = {"image_processor_type": kind, "image_mean": MEAN, "image_std": MEAN, "resample": 3}
    return {"preprocessor_config.json": {**own, **fields}}


CLIP = Family(
    architecture="CLIPModel",
    make_config=_clip,
    eos_token="</s>",
    frames=FRAMES,
    is_embedder=True,
    files=_preprocessor(
        "CLIPImageProcessor",
        size={"shortest_edge": SIDE},
        crop_size={"height": SIDE, "width": SIDE},
    ),
    media=MediaForm(inputs=_inputs),
)
SIGLIP = Family(
    architecture="SiglipModel",
    make_config=_siglip,
    eos_token="</s>",
    frames=END_ONLY,
    is_embedder=True,
    files=_preprocessor("SiglipImageProcessor", size={"height": SIDE, "width": SIDE}),
    media=MediaForm(inputs=_inputs),
)
SIGLIP2 = Family(
    architecture="Siglip2Model",
    make_config=_siglip2,
    eos_token="</s>",
    frames=END_ONLY,
    is_embedder=True,
    files=_preprocessor("Siglip2ImageProcessor", patch_size=16, max_num_patches=256),
    media=MediaForm(inputs=_inputs),
)
TIPSV2 = Family(
    architecture="Tipsv2Model",
    make_config=_tipsv2,
    eos_token="</s>",
    is_embedder=True,
    files=_preprocessor(
        "Tipsv2ImageProcessor",
        size={"height": SIDE, "width": SIDE},
        resample=2,
        do_normalize=False,
    ),
    media=MediaForm(inputs=_inputs),
)
