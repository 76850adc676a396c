"""LLaVA 1.5: CLIP's vision tower, two linear layers, and the standard decoder.

Shapes: B pictures, P patches and the class token, V the tower's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.hooks import MediaInput, MediaSpan
from mmdeploy_llm.layers import MLP, CausalLM, LayerNorm, Linear, quick_gelu, standard_decoder
from mmdeploy_llm.weights.map import Target, WeightMap
from torch import Tensor, nn

RENAMES = (
    (r"^model\.(vision_tower|multi_modal_projector)\.", r"\1."),
    (r"^model\.language_model\.", "model."),
    (r"^language_model\.", ""),
    (r"^vision_tower\.vision_model\.", "vision_tower."),
)


class LlavaForConditionalGeneration(CausalLM):
    """transformers' model of this name, with CLIP and a Llama decoder.

    Raises ModelNotSupportedError for another vision tower.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(standard_decoder(config.text_config, own=()))
        vision, layer = config.vision_config, config.vision_feature_layer
        known = (vision.model_type, vision.hidden_act, config.projector_hidden_act)
        if known != ("clip_vision_model", "quick_gelu", "gelu") or not isinstance(layer, int):
            raise ModelNotSupportedError(
                f"vision tower and activations {known} with vision_feature_layer {layer!r} are "
                "not supported; only CLIP's own and one layer are"
            )
        self.has_class_token = config.vision_feature_select_strategy != "default"
        num_layers = layer % (vision.num_hidden_layers + 1)  # layers of the tower that are used
        self.vision_tower = ClipTower(vision, num_layers)
        self.multi_modal_projector = Projector(vision.hidden_size, self.hidden_size)
        unused = "|".join(map(str, range(num_layers, vision.num_hidden_layers)))
        ignored = [r"\.post_layernorm\.", r"position_ids$"]
        ignored += [rf"encoder\.layers\.({unused})\."] if unused else []
        ignored += [r"lm_head\."] if self.lm_head is None else []
        self._weights = WeightMap(self, renames=RENAMES, ignored=ignored)

    def encode_media(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Returns one [num_tokens, hidden] for each item."""
        weight = self.multi_modal_projector.linear_1.weight
        pixels = torch.stack([item.tensors["pixels"] for item in items])
        patches = self.vision_tower(pixels.to(weight.device, weight.dtype))
        return list(self.multi_modal_projector(patches[:, 0 if self.has_class_token else 1 :]))

    def weight_targets(self, key: str) -> Sequence[Target] | None:
        """See mmdeploy_llm.weights.map."""
        return self._weights.targets(key)

    def positions(self, num_tokens: int, media: Sequence[MediaSpan]) -> Tensor | None:
        """Returns None: token i is at position i."""
        return None


class Projector(nn.Module):
    """Projects from the tower's width to the decoder's."""

    def __init__(self, in_size: int, out_size: int) -> None:
        super().__init__()
        self.linear_1 = Linear(in_size, out_size, bias=True)
        self.linear_2 = Linear(out_size, out_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[B, P, V] -> [B, P, hidden]."""
        out: Tensor = self.linear_2(F.gelu(self.linear_1(x)))
        return out


class ClipTower(nn.Module):
    """The first `num_layers` layers of CLIP's vision transformer."""

    def __init__(self, config: Any, num_layers: int) -> None:
        super().__init__()
        self.embeddings = ClipEmbeddings(config)
        self.pre_layrnorm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(ClipLayer(config) for _ in range(num_layers))

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, size, size] -> [B, P, V]."""
        x: Tensor = self.pre_layrnorm(self.embeddings(pixels))
        for layer in self.encoder.get_submodule("layers").children():
            x = layer(x)
        return x


class ClipEmbeddings(nn.Module):
    """Embeds patches and the class token, and adds their positions."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, patch = config.hidden_size, config.patch_size
        num_patches = (config.image_size // patch) ** 2
        self.class_embedding = nn.Parameter(torch.empty(size))
        self.patch_embedding = nn.Conv2d(3, size, patch, stride=patch, bias=False)
        self.position_embedding = nn.Embedding(num_patches + 1, size)

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, size, size] -> [B, P, V]."""
        patches = self.patch_embedding(pixels).flatten(2).transpose(1, 2)
        first = self.class_embedding.expand(pixels.shape[0], 1, -1)
        return torch.cat([first, patches], 1) + self.position_embedding.weight


class ClipLayer(nn.Module):
    """Attention and MLP, each after its norm and with a residual."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.layer_norm_eps
        self.layer_norm1 = LayerNorm(size, eps)
        self.self_attn = ClipAttention(size, config.num_attention_heads)
        self.layer_norm2 = LayerNorm(size, eps)
        self.mlp = MLP(size, config.intermediate_size, size, quick_gelu)

    def forward(self, x: Tensor) -> Tensor:
        """[B, P, V] -> [B, P, V]."""
        x = x + self.self_attn(self.layer_norm1(x))
        out: Tensor = x + self.mlp(self.layer_norm2(x))
        return out


class ClipAttention(nn.Module):
    """Attention in which every patch attends to all patches of its picture."""

    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            Linear(size, size, bias=True) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, P, V] -> [B, P, V]."""
        q, k, v = (
            project(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out: Tensor = self.out_proj(mixed)
        return out
