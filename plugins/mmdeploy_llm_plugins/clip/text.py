"""The text tower: a plain transformer with learned positions, whose last token has the text's
state. Shapes: T tokens, H heads, D head size."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mmdeploy_llm.forward import AttentionContext, ForwardInputs
from mmdeploy_llm.layers import MLP, Embedding, LayerNorm, Linear, MergedLinear, vision_activation


class TextAttention(nn.Module):
    """Attention of the kind that the model has, causal or in both directions."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.layer, self.num_heads = layer, config.num_attention_heads
        parts = {"q_proj": size, "k_proj": size, "v_proj": size}
        self.qkv_proj = MergedLinear(size, parts, bias=True)
        self.out_proj = Linear(size, size, bias=True)

    def forward(self, x: Tensor, attn: AttentionContext) -> Tensor:
        """Computes attention with its projections, [T, size] -> [T, size]."""
        qkv = self.qkv_proj(x).view(x.shape[0], 3 * self.num_heads, -1)
        q, k, v = qkv.chunk(3, 1)
        out: Tensor = self.out_proj(attn.attend(self.layer, q, k, v).flatten(1))
        return out


class TextLayer(nn.Module):
    """Attention and MLP, each after its norm."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.norm1 = LayerNorm(size, config.layer_norm_eps)
        self.self_attn = TextAttention(config, layer)
        self.norm2 = LayerNorm(size, config.layer_norm_eps)
        activation = vision_activation(config.hidden_act)
        self.mlp = MLP(size, config.intermediate_size, size, activation)

    def forward(self, x: Tensor, attn: AttentionContext) -> Tensor:
        """Computes the layer, [T, size] -> [T, size]."""
        x = x + self.self_attn(self.norm1(x), attn)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class TextTower(nn.Module):
    """Computes the states of all tokens. Placeholders of images may have any id."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.vocab_size = config.vocab_size
        self.token_embedding = Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(
            TextLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Returns [T, size]."""
        ids = inputs.token_ids.clamp(max=self.vocab_size - 1)
        x = self.embed(self.token_embedding(ids), inputs.positions)
        for layer in self.layers:
            x = layer(x, inputs.attn)
        out: Tensor = self.norm(x)
        return out

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Adds the positions [T] to the embeddings of tokens [T, size]."""
        out: Tensor = x + self.position_embedding(positions)
        return out
