"""LLaVA with a SigLIP tower and a Llama."""

from dataclasses import replace

import torch
from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.layers import (
    MLP,
    CausalLM,
    PlainVisionConfig,
    PlainVisionEncoder,
    standard_decoder,
    to_device,
    vision_activation,
)
from mmdeploy_llm.weights.map import WeightMap

RENAMES = (
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^(model\.)?language_model\.(model\.)?", "model."),
    (r"^(model\.)?multi_modal_projector\.linear_", "projector.fc"),
    (r"^(model\.)?vision_tower\.(vision_model\.)?", "visual."),
    (r"^visual\.embeddings\.patch_embedding\.", "visual.patch_embed.proj."),
    (r"^visual\.embeddings\.position_embedding\.weight", "visual.positions"),
    (r"^visual\.encoder\.layers\.", "visual.blocks."),
    (r"^(visual\.blocks\.\d+)\.layer_norm", r"\1.norm"),
    (r"^(visual\.blocks\.\d+)\.self_attn\.out_proj\.", r"\1.attn.proj."),
    (r"^(visual\.blocks\.\d+)\.self_attn\.", r"\1.attn."),
)
IGNORED = (r"vision_tower\.(vision_model\.)?(post_layernorm|head)\.",)
NEEDED = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}


class LlavaMini(CausalLM):
    def __init__(self, config):
        vision = config.vision_config
        for name, value in NEEDED.items():
            if getattr(config, name) != value:
                raise ModelNotSupportedError(f"{name} must be {value!r}")
        if vision.model_type != "siglip_vision_model":
            raise ModelNotSupportedError(f"a tower {vision.model_type!r}")
        decoder = standard_decoder(config.text_config, own=())
        super().__init__(replace(decoder, is_tied=config.tie_word_embeddings))
        self.visual = PlainVisionEncoder(tower(vision))
        activation = vision_activation(config.projector_hidden_act)
        self.projector = MLP(vision.hidden_size, self.hidden_size, self.hidden_size, activation)
        ignored = IGNORED if self.lm_head else (*IGNORED, r"(^|\.)lm_head\.")
        self.weight_map = WeightMap(self, renames=RENAMES, ignored=ignored)

    def encode_media(self, items):
        device = self.model.embed_tokens.weight.device
        pixels = torch.cat([to_device(item.tensors["pixels"], device) for item in items])
        rows = self.projector(self.visual(pixels))
        return torch.split(rows, [item.num_tokens for item in items])


def tower(vision):
    return PlainVisionConfig(
        size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_layers=vision.num_hidden_layers,
        num_heads=vision.num_attention_heads,
        image_side=vision.image_size // vision.patch_size,
        merge_size=1,
        patch_size=vision.patch_size,
        norm_eps=vision.layer_norm_eps,
        activation=vision.hidden_act,
    )
