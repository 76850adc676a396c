"""GIT: transformers' tower of CLIP's kind, and a decoder of BERT's layers.

    picture --> tower --> projection --> layers, whose tokens see each other and no text
    x = norm(x + attention of x to the picture and to the text so far, in one softmax)
    x = norm(x + fc2(activation(fc1(x))))

What the layers compute of a picture depends on no text: its keys and values are an item's of an
encoder, and text tokens attend to them. Shapes: T tokens, L tokens of a picture, H heads, D head
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.git.modeling_git import GitVisionModel

from mmdeploy_llm.caches import CrossKV, PagedKV
from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.forward import ForwardInputs
from mmdeploy_llm.hooks import MediaInput, MediaSpan
from mmdeploy_llm.layers import MLP, Embedding, LayerNorm, Linear, MergedLinear, refuse_unread
from mmdeploy_llm.weights.map import Target, WeightMap
from mmdeploy_llm_plugins.encoder_decoder.decoder import activation_of
from mmdeploy_llm_plugins.encoder_decoder.merged import StepAttention
from mmdeploy_llm_plugins.transformers_parts.tower import TransformersTower

from .image import num_cells

LAYER = r"^git\.encoder\.layer\.(\d+)\."
NAMES = (
    (r"^git\.image_encoder\.", "tower.inner."),
    (r"^git\.visual_projection\.visual_projection\.0\.", "projection."),
    (r"^git\.visual_projection\.visual_projection\.1\.", "projection_norm."),
    (r"^git\.embeddings\.LayerNorm\.", "embeddings_norm."),
    (r"^git\.embeddings\.", ""),
    (rf"{LAYER}attention\.self\.", r"layers.\1."),
    (rf"{LAYER}attention\.output\.dense\.", r"layers.\1.out_proj."),
    (rf"{LAYER}attention\.output\.LayerNorm\.", r"layers.\1.norm."),
    (rf"{LAYER}intermediate\.dense\.", r"layers.\1.mlp.fc1."),
    (rf"{LAYER}output\.dense\.", r"layers.\1.mlp.fc2."),
    (rf"{LAYER}output\.LayerNorm\.", r"layers.\1.mlp_norm."),
)
# Buffers of old checkpoints, and what is added to the frames of a video.
IGNORED = (r"position_ids$", r"^git\.img_temporal_embedding\.")
READ = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "num_image_with_embedding"),
    *("vision_config", "initializer_range"),
)


class GitLayer(nn.Module):
    """Attention and MLP, each with a norm after its sum."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        size, inner, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps
        self.layer, self.num_heads = layer, config.num_attention_heads
        self.qkv = MergedLinear(size, {"query": size, "key": size, "value": size}, bias=True)
        self.out_proj = Linear(size, size, bias=True)
        self.mlp = MLP(size, inner, size, activation_of(config.hidden_act))
        self.norm, self.mlp_norm = LayerNorm(size, eps), LayerNorm(size, eps)

    def forward(self, x: Tensor, attention: StepAttention) -> Tensor:
        """Computes the layer for tokens of text, [T, hidden] -> [T, hidden]."""
        return self._finished(x, attention.attend(self.layer, *self._heads(x)))

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the layer for the tokens of a picture, [L, hidden] -> [L, hidden]. Returns their
        keys and values, too, [2, L, H, D]."""
        q, k, v = self._heads(x)
        own, keys, values = (part.transpose(0, 1)[None] for part in (q, k, v))
        attended = F.scaled_dot_product_attention(own, keys, values)[0].transpose(0, 1)
        return self._finished(x, attended), torch.stack([k, v])

    def _heads(self, x: Tensor) -> tuple[Tensor, ...]:
        parts = self.qkv(x).chunk(3, -1)
        return tuple(part.reshape(x.shape[0], self.num_heads, -1) for part in parts)

    def _finished(self, x: Tensor, attended: Tensor) -> Tensor:
        x = self.norm(x + self.out_proj(attended.flatten(1)))
        out: Tensor = self.mlp_norm(x + self.mlp(x))
        return out


class GitForCausalLM(nn.Module):
    """transformers' class of the same name, of pictures."""

    attends_itself = True

    def __init__(self, config: Any) -> None:
        super().__init__()
        refuse_unread(config, READ)
        size, eps, heads = config.hidden_size, config.layer_norm_eps, config.num_attention_heads
        vision = config.vision_config
        if size % heads:
            raise ModelNotSupportedError(
                f"hidden_size {size} is no multiple of the {heads} attention heads"
            )
        self.num_layers, self.hidden_size = config.num_hidden_layers, size
        self.num_kv_heads, self.head_dim = heads, size // heads
        self.max_positions = config.max_position_embeddings
        kv = {"num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim}
        self.cache = (PagedKV(**kv),) * self.num_layers
        self.cross = CrossKV(num_layers=self.num_layers, longest=num_cells(vision), **kv)
        self.tower = TransformersTower(vision, GitVisionModel)
        self.projection = Linear(vision.hidden_size, size, bias=True)
        self.projection_norm = LayerNorm(size, vision.layer_norm_eps)
        self.word_embeddings = Embedding(config.vocab_size, size)
        self.position_embeddings = Embedding(config.max_position_embeddings, size)
        self.embeddings_norm = LayerNorm(size, eps)
        self.layers = nn.ModuleList(GitLayer(config, index) for index in range(self.num_layers))
        self.output = Linear(size, config.vocab_size, bias=True)
        self.is_tied: bool = config.tie_word_embeddings
        self.weight_map = WeightMap(self, renames=NAMES, ignored=IGNORED)

    @property
    def text_layers(self) -> Sequence[nn.Module]:
        """See hooks.Model."""
        return tuple(self.layers)

    def encode_media(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Returns keys and values of each picture, see caches.CrossKV."""
        device = self.word_embeddings.weight.device
        pixels = torch.cat([item.tensors["pixel_values"] for item in items])
        states = self.tower.inner(pixels.to(device, self.tower.dtype)).last_hidden_state
        return [self._read(own) for own in self.projection_norm(self.projection(states))]

    def _read(self, x: Tensor) -> Tensor:
        """Runs the layers over the tokens of a picture; returns [layers, 2, L, H, D]."""
        layers: Any = self.layers
        found = []
        for layer in layers:
            x, kept = layer.read(x)
            found.append(kept)
        return torch.stack(found)

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Returns the last hidden states, [T, hidden]."""
        x = self.word_embeddings(inputs.token_ids) + self.position_embeddings(inputs.positions)
        out: Tensor = self.embeddings_norm(x)
        attention = StepAttention(inputs.attn, inputs.cross)
        for layer in self.layers:
            out = layer(out, attention)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Multiplies by the output head, [N, hidden] -> [N, vocab]."""
        out: Tensor = self.output(hidden)
        return out

    def positions(self, num_tokens: int, media: Sequence[MediaSpan]) -> Tensor | None:
        """Returns None: token i of the text is at position i."""
        return None

    def weight_targets(self, key: str) -> Sequence[Target] | None:
        """See hooks.Model. A head that is the embedding is loaded from it."""
        found = self.weight_map.targets(key)
        if self.is_tied and found and found[0].name == "word_embeddings.weight":
            return (*found, Target(name="output.weight"))
        return () if self.is_tied and key == "output.weight" else found
