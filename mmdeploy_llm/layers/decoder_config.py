"""DecoderConfig: the sizes and options of the standard decoder.

What a field means, and the keys of transformers' configs that standard_decoder reads into it, are
kept beside the field; docs/decoder_options.md is the table of them, with families that use each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mmdeploy_llm.caches import PagedKV
from mmdeploy_llm.layers.basic.mlp import AnyActivation
from mmdeploy_llm.layers.basic.norm import (
    LateRMSNorm,
    LayerNorm,
    NoNorm,
    RMSNorm,
    ZeroCenteredRMSNorm,
)
from mmdeploy_llm.layers.basic.rotary import RotaryConfig

from .moe import MoEConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AlibiConfig:
    """Linear biases of positions: factor * (slope * index of the key), for each query head.

    rounds: whether the product is rounded to bf16, or to the model's dtype; None: neither.
    """

    slopes: tuple[float, ...]
    factor: float = 1.0
    rounds: Literal["bfloat16", "model"] | None = None


def about(meaning: str, *keys: str) -> Mapping[str, str | tuple[str, ...]]:
    """Returns the metadata of a field. keys: of transformers' configs; none: the family's code sets
    the field."""
    return {"meaning": meaning, "keys": keys}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and options of a Decoder; `field.metadata` and docs/decoder_options.md explain each."""

    vocab_size: int = field(metadata=about("tokens of the embedding and the head", "vocab_size"))
    hidden_size: int = field(metadata=about("channels of the residual stream", "hidden_size"))
    intermediate_size: int = field(
        metadata=about("inner channels of dense MLPs", "intermediate_size")
    )
    num_layers: int = field(metadata=about("layers", "num_hidden_layers"))
    num_heads: int = field(metadata=about("query heads", "num_attention_heads"))
    num_kv_heads: int = field(
        metadata=about(
            "key and value heads; where the key is null, num_heads", "num_key_value_heads"
        )
    )
    rotary: RotaryConfig = field(
        metadata=about(
            "rotary embedding, with the channels of a head: base, scaled frequencies, the part of "
            "a head that is rotated, the layout of pairs",
            "rope_parameters",
            "head_dim",
            "rope_interleave",
        )
    )
    norm_eps: float = field(
        metadata=about(
            "epsilon of all norms; the name of its key tells the kind of norm",
            "rms_norm_eps",
            "norm_eps",
            "layer_norm_eps",
            "layer_norm_epsilon",
            "layernorm_epsilon",
            "norm_epsilon",
        )
    )
    qkv_bias: bool = field(
        default=False,
        metadata=about(
            "biases of q_proj, k_proj and v_proj",
            "qkv_bias",
            "use_qkv_bias",
            "attention_bias",
            "use_bias",
        ),
    )
    out_bias: bool = field(
        default=False,
        metadata=about("bias of o_proj", "attention_out_bias", "attention_bias", "use_bias"),
    )
    mlp_bias: bool = field(
        default=False,
        metadata=about("biases of dense MLPs", "mlp_bias", "use_bias"),
    )
    head_bias: bool = field(
        default=False,
        metadata=about("bias of an output head that is not tied", "lm_head_bias"),
    )
    is_tied: bool = field(
        default=False,
        metadata=about("the embedding is the output head too", "tie_word_embeddings"),
    )
    qk_norm: bool = field(
        default=False,
        metadata=about("RMSNorm over the channels of each head before rope (q_norm, k_norm)"),
    )
    has_full_qk_norm: bool = field(
        default=False,
        metadata=about(
            "RMSNorm over all channels of q together, and of k, before rope; heads then cannot be "
            "divided among ranks"
        ),
    )
    pre_norms: bool = field(
        default=True,
        metadata=about(
            "norm the inputs of attention and MLP (input_layernorm, post_attention_layernorm); "
            "false only with post_norms"
        ),
    )
    post_norms: bool = field(
        default=False,
        metadata=about(
            "norm the outputs of attention and MLP before they are added to the residual stream "
            "(post_self_attn_layernorm, post_mlp_layernorm)"
        ),
    )
    zero_centered_norms: bool = field(
        default=False,
        metadata=about("norms multiply by 1 + weight"),
    )
    rounds_norms_late: bool = field(
        default=False,
        metadata=about(
            "RMSNorms multiply by their weight in float32 and are then rounded to the dtype, not "
            "before; so are those with zero_centered_norms anyway"
        ),
    )
    layer_norms: bool = field(
        default=False,
        metadata=about(
            "norms of the residual stream are LayerNorms, not RMSNorms: so read where the key of "
            "norm_eps begins with layer, or is norm_epsilon, or there is none"
        ),
    )
    has_norm_biases: bool = field(
        default=False,
        metadata=about("LayerNorms have biases; read as true with layer_norms"),
    )
    has_norm_weights: bool = field(
        default=True,
        metadata=about("LayerNorms have weights"),
    )
    is_parallel: bool = field(
        default=False,
        metadata=about(
            "attention and MLP read one norm of the residual stream, and both are added to it; "
            "there is no post_attention_layernorm",
            "use_parallel_residual",
        ),
    )
    has_mlp_norm: bool = field(
        default=False,
        metadata=about(
            "the MLP of a parallel layer has a norm of its own, post_attention_layernorm"
        ),
    )
    has_gate: bool = field(
        default=True,
        metadata=about(
            "dense MLPs multiply by a gate (gate_proj, up_proj, down_proj); without it they are "
            "fc2(activation(fc1(x)))"
        ),
    )
    activation: AnyActivation = field(
        default="silu",
        metadata=about(
            "activation of dense MLPs: gelu, gelu_pytorch_tanh, quick_gelu, relu, relu2, silu; "
            "transformers' other names of them are read too",
            "hidden_activation",
            "hidden_act",
            "activation_function",
            "activation",
        ),
    )
    windows: tuple[int | None, ...] | None = field(
        default=None,
        metadata=about(
            "for each layer, the number of tokens that a token attends to, itself included; None: "
            "all",
            "layer_types",
            "sliding_window",
        ),
    )
    local_rotary: RotaryConfig | None = field(
        default=None,
        metadata=about(
            "rotary embedding of the layers with a window; None: rotary. Read where "
            "rope_parameters are by type of layer"
        ),
    )
    nope_layers: frozenset[int] = field(
        default=frozenset(),
        metadata=about(
            "indices of the layers without rotary embedding (NoPE)",
            "no_rope_layers",
            "no_rope_layer_interval",
        ),
    )
    alibi: AlibiConfig | None = field(
        default=None,
        metadata=about(
            "linear biases of attention scores by the key's position, with nope_layers for all"
        ),
    )
    num_positions: int = field(
        default=0,
        metadata=about("rows of a learned embedding of positions (embed_positions); 0: none"),
    )
    has_embed_norm: bool = field(
        default=False,
        metadata=about("a norm of the embeddings (embed_norm)"),
    )
    embed_scale: float = field(
        default=1.0,
        metadata=about(
            "factor of the token embeddings, media not included, rounded to the model's dtype",
            "embedding_multiplier",
        ),
    )
    residual_scale: float = field(
        default=1.0,
        metadata=about("factor of the outputs of attention and MLP", "residual_multiplier"),
    )
    logit_scale: float = field(
        default=1.0,
        metadata=about(
            "factor of the logits; logits_scaling divides them", "logit_scale", "logits_scaling"
        ),
    )
    score_scale: float | None = field(
        default=None,
        metadata=about(
            "factor of attention scores; None: head_dim ** -0.5. query_pre_attn_scalar is the x of "
            "x ** -0.5",
            "attention_multiplier",
            "query_pre_attn_scalar",
        ),
    )
    score_softcap: float | None = field(
        default=None,
        metadata=about("attention scores s become cap * tanh(s / cap)", "attn_logit_softcapping"),
    )
    logit_softcap: float | None = field(
        default=None,
        metadata=about("logits s become cap * tanh(s / cap)", "final_logit_softcapping"),
    )
    has_sinks: bool = field(
        default=False,
        metadata=about(
            "each head has a learned score that takes part in the softmax and has no value "
            "(forward.AttentionContext)"
        ),
    )
    moe: MoEConfig | None = field(default=None, metadata=about("experts of sparse MLPs"))
    moe_layers: frozenset[int] = field(
        default=frozenset(),
        metadata=about("indices of the layers whose MLP is sparse"),
    )

    def __post_init__(self) -> None:
        """Checks combinations that no layer implements."""
        assert self.pre_norms or (self.post_norms and not self.is_parallel), "no norm at all"
        assert not self.has_mlp_norm or self.is_parallel, "has_mlp_norm is for parallel layers"

    @property
    def head_dim(self) -> int:
        """Channels of a head, D."""
        return self.rotary.head_dim

    @property
    def caches(self) -> tuple[PagedKV, ...]:
        """The cache of each layer."""
        heads, windows = self.num_kv_heads, self.windows or (None,) * self.num_layers
        return tuple(
            PagedKV(num_kv_heads=heads, head_dim=self.head_dim, window=own) for own in windows
        )

    def new_norm(self, size: int) -> RMSNorm:
        """Returns an RMSNorm of the model's kind over `size` channels."""
        late = LateRMSNorm if self.rounds_norms_late else RMSNorm
        kind = ZeroCenteredRMSNorm if self.zero_centered_norms else late
        return kind(size, self.norm_eps)

    def new_residual_norm(self) -> RMSNorm | LayerNorm:
        """Returns a norm of the residual stream."""
        if not self.layer_norms:
            return self.new_norm(self.hidden_size)
        return LayerNorm(
            self.hidden_size,
            self.norm_eps,
            has_bias=self.has_norm_biases,
            has_weight=self.has_norm_weights,
            is_centred=self.zero_centered_norms,
        )

    def new_input_norm(self) -> RMSNorm | LayerNorm | NoNorm:
        """Returns a norm before attention or an MLP, if the model has those."""
        return self.new_residual_norm() if self.pre_norms else NoNorm()
