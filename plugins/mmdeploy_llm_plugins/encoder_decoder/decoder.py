"""The decoder of BART, MBart, Whisper and TrOCR, and the model around it.

    x = embedding * scale + position          then a norm, in some
    x = norm(x + self attention(x))           norms after the sums (BART, TrOCR), or
    x = norm(x + cross attention(x))          before the parts and at the end (MBart, Whisper)
    x = norm(x + mlp(x))

An item of the encoder is stored as the keys and values of every layer, so that a decode step
multiplies nothing of it again. Shapes: T tokens, L tokens of an item, H heads, D head size.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmdeploy_llm.caches import CrossKV
from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.forward import ForwardInputs
from mmdeploy_llm.hooks import MediaInput, MediaSpan
from mmdeploy_llm.layers import (
    MLP,
    Embedding,
    KernelLayer,
    LayerNorm,
    Linear,
    MergedLinear,
    keep_sums,
)
from mmdeploy_llm.weights.map import Replacement, Target, WeightMap

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_pytorch_tanh", "relu": "relu", "silu": "silu"}
NORM_EPS = 1e-5  # torch's default, in no config of most of these families
# From transformers' names to those of the layers here.
RENAMES: Sequence[tuple[str, Replacement]] = (
    (r"^(decoder\.layers\.\d+)\.(fc[12])\.", r"\1.mlp.\2."),
    (r"^(decoder\.layers\.\d+)\.final_layer_norm\.", r"\1.mlp_norm."),
    (r"^(decoder\.layers\.\d+)\.(self|encoder)_attn_layer_norm\.", r"\1.\2_norm."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossDecoderConfig:
    """Sizes and options of a CrossDecoder.

    encoder_size: channels of the encoder's output. encoder_positions: tokens of its longest item.
    num_positions: tokens of the longest sequence; None: of any, where no position is learned.
    position_offset: rows of the table before the first position's.
    norms_first: norms stand before the parts, with one at the end.
    has_embedding_norm: the embeddings are normed. bias: queries and values have a bias; key_bias,
        out_bias: keys and the output of attention have one.
    is_tied: the embeddings are the output head.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    encoder_size: int
    encoder_positions: int
    num_positions: int | None
    position_offset: int = 0
    activation: str = "gelu"
    embedding_scale: float = 1.0
    norms_first: bool = False
    has_embedding_norm: bool = True
    bias: bool = True
    key_bias: bool = True
    out_bias: bool = True
    norm_eps: float = NORM_EPS
    is_tied: bool = True

    def __post_init__(self) -> None:
        """Raises ModelNotSupportedError for an unknown activation, and for heads that do not divide
        the hidden size."""
        activation_of(self.activation)
        if self.hidden_size % self.num_heads:
            raise ModelNotSupportedError(
                f"hidden_size {self.hidden_size} of this decoder is no multiple of its "
                f"{self.num_heads} attention heads"
            )

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.hidden_size // self.num_heads

    @property
    def cross(self) -> CrossKV:
        """Describes what the layers read of an encoder's item."""
        return CrossKV(
            num_layers=self.num_layers,
            num_kv_heads=self.num_heads,
            head_dim=self.head_dim,
            longest=self.encoder_positions,
        )


def activation_of(name: str) -> Any:
    """Returns the activation of our layers. Raises ModelNotSupportedError for an unknown one."""
    if name not in ACTIVATIONS:
        raise ModelNotSupportedError(
            f"the activation {name!r:.40} of this decoder is not supported, only "
            f"{', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def embedding_scale(is_scaled: bool, hidden_size: int) -> float:
    """Returns the factor of the embeddings that a config's scale_embedding asks for."""
    return math.sqrt(hidden_size) if is_scaled else 1.0


class SelfAttention(nn.Module):
    """Attention to the sequence so far."""

    def __init__(self, config: CrossDecoderConfig, layer: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.layer, self.shape = layer, (-1, config.num_heads, config.head_dim)
        self.is_merged = config.key_bias == config.bias
        if self.is_merged:
            parts = {"q_proj": size, "k_proj": size, "v_proj": size}
            self.qkv_proj = MergedLinear(size, parts, bias=config.bias)
        else:
            parts = {"q_proj": size, "v_proj": size}
            self.qv_proj = MergedLinear(size, parts, bias=config.bias)
            self.k_proj = Linear(size, size, bias=config.key_bias)
        self.out_proj = Linear(size, size, bias=config.out_bias)

    def forward(self, x: Tensor, inputs: ForwardInputs) -> Tensor:
        """Computes attention with its projections, [T, hidden] -> [T, hidden]."""
        if self.is_merged:
            q, k, v = self.qkv_proj(x).chunk(3, -1)
        else:
            q, v = self.qv_proj(x).chunk(2, -1)
            k = self.k_proj(x)
        q, k, v = (part.reshape(self.shape) for part in (q, k, v))
        out: Tensor = self.out_proj(inputs.attn.attend(self.layer, q, k, v).flatten(1))
        return out


class CrossAttention(KernelLayer):
    """Attention to the encoder's items."""

    def __init__(self, config: CrossDecoderConfig, layer: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.layer, self.shape = layer, (-1, config.num_heads, config.head_dim)
        self.q_proj = Linear(size, size, bias=config.bias)
        self.k_proj = Linear(config.encoder_size, size, bias=config.key_bias)
        self.v_proj = Linear(config.encoder_size, size, bias=config.bias)
        self.out_proj = Linear(size, size, bias=config.out_bias)

    def forward(self, x: Tensor, inputs: ForwardInputs) -> Tensor:
        """Computes attention with its projections, [T, hidden] -> [T, hidden]."""
        assert inputs.cross is not None, "the model has the attribute cross"
        q = self.q_proj(x).view(self.shape)
        out: Tensor = self.out_proj(inputs.cross.attend(self.layer, q).flatten(1))
        return out

    def keys_values(self, states: Tensor) -> Tensor:
        """Returns keys and values of an item, [L, encoder size] -> [2, L, H, D]."""
        return torch.stack([self.k_proj(states), self.v_proj(states)]).view(
            2, *states.shape[:1], *self.shape[1:]
        )


class CrossDecoderLayer(nn.Module):
    """Self attention, cross attention and MLP, each with a norm after its sum or before it."""

    def __init__(self, config: CrossDecoderConfig, layer: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.norms_first = config.norms_first
        self.self_attn = SelfAttention(config, layer)
        self.encoder_attn = CrossAttention(config, layer)
        activation = activation_of(config.activation)
        self.mlp = MLP(size, config.intermediate_size, size, activation)
        self.self_norm, self.encoder_norm, self.mlp_norm = (
            LayerNorm(size, config.norm_eps) for _ in range(3)
        )

    def forward(self, x: Tensor, inputs: ForwardInputs) -> Tensor:
        """Computes the layer, [T, hidden] -> [T, hidden]."""
        if self.norms_first:
            x = x + self.self_attn(self.self_norm(x), inputs)
            x = x + self.encoder_attn(self.encoder_norm(x), inputs)
            out: Tensor = x + self.mlp(self.mlp_norm(x))
            return out
        x = self.self_norm(x + self.self_attn(x, inputs))
        x = self.encoder_norm(x + self.encoder_attn(x, inputs))
        out = self.mlp_norm(x + self.mlp(x))
        return out


class CrossDecoder(nn.Module):
    """Computes the hidden states of all tokens."""

    def __init__(self, config: CrossDecoderConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.scale, self.offset = config.embedding_scale, config.position_offset
        self.embed_tokens = Embedding(config.vocab_size, size)
        assert config.num_positions is not None, "positions are learned"
        num_positions = config.num_positions + config.position_offset
        self.embed_positions: nn.Module = Embedding(num_positions, size)
        has_norm = config.has_embedding_norm
        self.layernorm_embedding = LayerNorm(size, config.norm_eps) if has_norm else None
        self.layers = nn.ModuleList(
            CrossDecoderLayer(config, layer) for layer in range(config.num_layers)
        )
        self.layer_norm = LayerNorm(size, config.norm_eps) if config.norms_first else None

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Returns [T, hidden]."""
        x = self.embed_tokens(inputs.token_ids)
        x = x if self.scale == 1 else x * self.scale
        x = x + self.embed_positions(inputs.positions + self.offset).to(x.dtype)
        x = x if self.layernorm_embedding is None else self.layernorm_embedding(x)
        for layer in self.layers:
            x = layer(x, inputs)
        out: Tensor = x if self.layer_norm is None else self.layer_norm(x)
        return out

    def keys_values(self, states: Tensor) -> Tensor:
        """Returns what all layers read of an item, [L, encoder size] -> [layers, 2, L, H, D]."""
        layers: Any = self.layers
        return torch.stack([layer.encoder_attn.keys_values(states) for layer in layers])


class EncoderDecoderLM(nn.Module):
    """A decoder with an encoder, which a subclass adds and runs in `encode`."""

    def __init__(
        self,
        config: CrossDecoderConfig,
        new_decoder: Callable[[CrossDecoderConfig], Any] = CrossDecoder,
    ) -> None:
        """new_decoder: builds another decoder, with embed_tokens and keys_values as CrossDecoder
        has them."""
        super().__init__()
        self.decoder: Any = new_decoder(config)
        self.lm_head: Linear | None = None
        if not config.is_tied:
            self.lm_head = Linear(config.hidden_size, config.vocab_size)
        keep_sums(self.lm_head or self.decoder.embed_tokens)
        self.cross = config.cross
        self.num_layers, self.hidden_size = config.num_layers, config.hidden_size
        self.num_kv_heads, self.head_dim = config.num_heads, config.head_dim
        self.max_positions = config.num_positions
        self.weight_map: WeightMap

    @property
    def text_layers(self) -> Sequence[nn.Module]:
        """See hooks.Model."""
        return tuple(self.decoder.layers)

    @property
    def tied_head(self) -> Embedding | None:
        """The embedding that is the output head too."""
        found: Embedding | None = self.decoder.embed_tokens if self.lm_head is None else None
        return found

    @abstractmethod
    def encode(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Returns the encoder's output of each item, [num_tokens, encoder size]."""

    def encode_media(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Returns keys and values of each item, see caches.CrossKV."""
        return [self.decoder.keys_values(states) for states in self.encode(items)]

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Returns the last hidden states, [T, hidden]."""
        out: Tensor = self.decoder(inputs)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Multiplies by the output head, [N, hidden] -> [N, vocab] float32."""
        head = self.decoder.embed_tokens.product if self.lm_head is None else self.lm_head
        out: Tensor = head(hidden)
        return out

    def positions(self, num_tokens: int, media: Sequence[MediaSpan]) -> Tensor | None:
        """Returns None: token i is at position i."""
        return None

    def weight_targets(self, key: str) -> Sequence[Target] | None:
        """See hooks.Model."""
        return self.weight_map.targets(key)
