"""The encoder of BERT and of what grew from it: every token attends to all tokens of its text.

    x = norm(word + position + token type)
    x = norm(x + o(attend(rope(qkv(x)))))      norms after the sums (BERT), or
    x = x + o(attend(rope(qkv(norm(x)))))      before the parts and at the end (ModernBERT)

Positions are learned or rotary. Parameters have the names of transformers' later classes, such as
layers.N.self_attn.q_proj, with q, k, v and gate, up fused; `families` translates the others.

Shapes: T tokens, H heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.forward import AttentionContext, ForwardInputs
from mmdeploy_llm.layers import (
    MLP,
    Embedding,
    GatedMLP,
    LayerNorm,
    Linear,
    MergedLinear,
    Rotary,
    RotaryConfig,
)

ACTIVATIONS = {  # transformers' names -> those of `layers`
    "gelu": "gelu",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Sizes and options of an Encoder.

    embedding_size: of the embeddings where it is not hidden_size; a matrix widens them.
    num_positions: rows of the table of learned positions; 0: there is none.
    padding_id: of RoBERTa and its kin: the first position is padding_id + 1, and tokens with this
        id have the position padding_id and are not counted. None: positions begin at 0.
    num_types: token types, 0: there are none.
    norms_first: whether norms stand before attention and MLP, with one at the end.
    has_gate: the MLP is gated. down_bias: of its last matrix; mlp_bias: of the others.
    windows: for each layer its window of tokens, both sides together; None: all of the text.
    rotary, local_rotary: of layers without and with a window; None: no rotary embedding.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    norm_eps: float
    activation: str = "gelu"
    embedding_size: int | None = None
    num_positions: int = 0
    padding_id: int | None = None
    num_types: int = 0
    norms_first: bool = False
    norm_bias: bool = True
    has_gate: bool = False
    mlp_bias: bool = True
    down_bias: bool = True
    attention_bias: bool = True
    windows: tuple[int | None, ...] = ()
    rotary: RotaryConfig | None = None
    local_rotary: RotaryConfig | None = None

    def __post_init__(self) -> None:
        """Raises ModelNotSupportedError for heads that do not divide the hidden size, and for an
        unknown activation."""
        if self.hidden_size % self.num_heads:
            raise ModelNotSupportedError(
                f"hidden_size {self.hidden_size} of this encoder is no multiple of its "
                f"{self.num_heads} attention heads"
            )
        activation_of(self.activation)

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.hidden_size // self.num_heads

    @property
    def max_positions(self) -> int | None:
        """The most tokens of a text for which there are learned positions; None: any number."""
        if not self.num_positions:
            return None
        return self.num_positions - (0 if self.padding_id is None else self.padding_id + 1)

    def new_norm(self, size: int | None = None) -> LayerNorm:
        """Builds a norm of the hidden size, or of another."""
        return LayerNorm(size or self.hidden_size, self.norm_eps, has_bias=self.norm_bias)


def activation_of(name: Any) -> Any:
    """Returns our name of an activation. Raises ModelNotSupportedError for an unknown one."""
    if name not in ACTIVATIONS:
        raise ModelNotSupportedError(
            f"the activation {name!r:.40} of this encoder is not supported, only "
            f"{', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Holds what all layers of a step share.

    starts: [T] int64, for each token the row of the first token of its text.
    rope, local_rope: None without rotary embedding.
    """

    attn: AttentionContext
    starts: Tensor
    rope: Any = None
    local_rope: Any = None


def first_rows(positions: Tensor) -> Tensor:
    """Returns for each row the row where its text begins, [T]: texts are whole in a step, and
    begin at position 0."""
    rows = torch.arange(positions.shape[-1], device=positions.device)
    return torch.where(positions == 0, rows, 0).cummax(0).values


class Embeddings(nn.Module):
    """Sums the embeddings of word, position and token type, and norms them."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        size = config.embedding_size or config.hidden_size
        self.padding_id = config.padding_id
        self.word_embeddings = Embedding(config.vocab_size, size)
        self.position_embeddings = self.token_type_embeddings = None
        if config.num_positions:
            self.position_embeddings = Embedding(config.num_positions, size)
        if config.num_types:
            self.token_type_embeddings = Embedding(config.num_types, size)
        self.norm = config.new_norm(size)

    def forward(self, inputs: ForwardInputs, starts: Tensor) -> Tensor:
        """Returns [T, size]."""
        x = inputs.merge_media(self.word_embeddings(inputs.token_ids))
        if self.token_type_embeddings is not None:
            types = getattr(inputs, "token_types", None)
            types = torch.zeros_like(inputs.token_ids) if types is None else types
            x += self.token_type_embeddings(types)
        if self.position_embeddings is not None:
            x += self.position_embeddings(self._positions(inputs, starts))
        out: Tensor = self.norm(x)
        return out

    def _positions(self, inputs: ForwardInputs, starts: Tensor) -> Tensor:
        """Returns the rows of the table, [T]."""
        if self.padding_id is None:
            return inputs.positions
        is_word = (inputs.token_ids != self.padding_id).long()
        counted = is_word.cumsum(0)
        before = (counted - is_word)[starts]  # words of the texts before this one
        return (counted - before) * is_word + self.padding_id


class SelfAttention(nn.Module):
    """Attention to all tokens of the text, or to those in the window around the token."""

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__()
        size, bias = config.hidden_size, config.attention_bias
        self.layer, self.num_heads, self.head_dim = layer, config.num_heads, config.head_dim
        self.window = config.windows[layer] if config.windows else None
        parts = {"q_proj": size, "k_proj": size, "v_proj": size}
        self.qkv_proj = MergedLinear(size, parts, bias=bias)
        self.o_proj = Linear(size, size, bias=bias)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Computes attention with its projections, [T, hidden] -> [T, hidden]."""
        qkv = self.qkv_proj(x).view(x.shape[0], 3 * self.num_heads, self.head_dim)
        qk, v = qkv[:, : 2 * self.num_heads], qkv[:, 2 * self.num_heads :]
        rope = step.rope if self.window is None else step.local_rope
        if rope is not None:
            qk = rope.rotate(qk)
        out: Tensor = self.o_proj(
            self.attend(qk[:, : self.num_heads], qk[:, self.num_heads :], v, step).flatten(1)
        )
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """Attends, [T, H, D] -> [T, H, D]."""
        return step.attn.attend(self.layer, q, k, v, window=self.window)


class EncoderLayer(nn.Module):
    """Attention and MLP, each with a norm after its sum or before it."""

    def __init__(self, config: EncoderConfig, layer: int, attention: Any = SelfAttention) -> None:
        """attention: builds the attention of a layer, as SelfAttention is built."""
        super().__init__()
        self.norms_first = config.norms_first
        self.self_attn = attention(config, layer)
        # ModernBERT's first layer reads the normed embeddings themselves.
        has_first = not (config.norms_first and layer == 0)
        self.attention_norm = config.new_norm() if has_first else None
        self.mlp = new_mlp(config)
        self.mlp_norm = config.new_norm()

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Computes the layer, [T, hidden] -> [T, hidden]."""
        if self.norms_first:
            read = x if self.attention_norm is None else self.attention_norm(x)
            x = x + self.self_attn(read, step)
            out: Tensor = x + self.mlp(self.mlp_norm(x))
            return out
        assert self.attention_norm is not None
        x = self.attention_norm(x + self.self_attn(x, step))
        out = self.mlp_norm(x + self.mlp(x))
        return out


def new_mlp(config: EncoderConfig) -> nn.Module:
    """Builds the MLP of a layer."""
    size, inner = config.hidden_size, config.intermediate_size
    activation = activation_of(config.activation)
    if not config.has_gate:
        return MLP(size, inner, size, activation, bias=config.mlp_bias)
    mlp = GatedMLP(size, inner, bias=config.mlp_bias, activation=activation)
    if config.down_bias != config.mlp_bias:
        mlp.down_proj = Linear(inner, size, bias=config.down_bias)
    return mlp


class Encoder(nn.Module):
    """Computes the hidden states of all tokens."""

    def __init__(self, config: EncoderConfig, attention: Any = SelfAttention) -> None:
        """attention: see EncoderLayer."""
        super().__init__()
        self.embeddings = Embeddings(config)
        size = config.embedding_size
        self.widen = None
        if size is not None and size != config.hidden_size:
            self.widen = Linear(size, config.hidden_size, bias=True)
        self.layers = nn.ModuleList(
            EncoderLayer(config, layer, attention) for layer in range(config.num_layers)
        )
        self.final_norm = config.new_norm() if config.norms_first else None
        self.rotary = None if config.rotary is None else Rotary(config.rotary)
        local = config.local_rotary
        self.local_rotary = None if local is None else Rotary(local)

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Returns [T, hidden]."""
        starts = first_rows(inputs.positions)
        x: Tensor = self.embeddings(inputs, starts)
        if self.widen is not None:
            x = self.widen(x)
        step = self.begin(inputs, starts)
        for layer in self.layers:
            x = layer(x, step)
        return x if self.final_norm is None else self.final_norm(x)

    def begin(self, inputs: ForwardInputs, starts: Tensor) -> Step:
        """Returns what all layers share."""
        positions = inputs.positions
        return Step(
            attn=inputs.attn,
            starts=starts,
            rope=None if self.rotary is None else self.rotary(positions),
            local_rope=None if self.local_rotary is None else self.local_rotary(positions),
        )
