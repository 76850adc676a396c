"""DecoderConfig: the sizes and options of the standard decoder."""

from __future__ import annotations

from dataclasses import dataclass

from mmdeploy_llm.basic_layers.norm import LayerNorm, RMSNorm, ZeroCenteredRMSNorm
from mmdeploy_llm.basic_layers.rotary import RotaryConfig
from mmdeploy_llm.caches import PagedKV
from mmdeploy_llm.kernels import ActivationName

from .moe import MoEConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and options of a Decoder.

    qk_norm: norm the channels of every head before rope (q_norm, k_norm).
    has_full_qk_norm: norm all channels of q together, and all of k, before rope. Heads then
        cannot be divided among ranks.
    post_norms: norm the outputs of attention and MLP before they are added to the residual stream
        (post_self_attn_layernorm, post_mlp_layernorm).
    zero_centered_norms: norms multiply by 1 + weight.
    layer_norms: norms of the residual stream are LayerNorms, without biases unless
        has_norm_biases.
    is_parallel: attention and MLP of a layer read one norm of the residual stream, and both are
        added to it (Cohere); there is no post_attention_layernorm.
    windows: for each layer, the number of tokens that a token attends to, itself included; None:
        all.
    local_rotary: rotary embedding of the layers with a window; None: `rotary`.
    moe_layers: indices of the layers whose MLP is sparse.
    activation: of dense MLPs, by its name in transformers.
    embed_scale: factor of the token embeddings, media not included; it is rounded to the model's
        dtype.
    residual_scale: factor of the outputs of attention and MLP. logit_scale: of the logits.
    score_scale: factor of attention scores; None: head_dim ** -0.5.
    score_softcap, logit_softcap: attention scores, and logits, s become cap * tanh(s / cap); None:
        no cap.
    has_sinks: each head has a learned score that takes part in the softmax and has no value; see
        forward.AttentionContext.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    rotary: RotaryConfig
    norm_eps: float
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    is_tied: bool = False
    qk_norm: bool = False
    has_full_qk_norm: bool = False
    zero_centered_norms: bool = False
    layer_norms: bool = False
    has_norm_biases: bool = False
    is_parallel: bool = False
    post_norms: bool = False
    windows: tuple[int | None, ...] | None = None
    local_rotary: RotaryConfig | None = None
    activation: ActivationName = "silu"
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    score_scale: float | None = None
    score_softcap: float | None = None
    logit_softcap: float | None = None
    has_sinks: bool = False
    moe: MoEConfig | None = None
    moe_layers: frozenset[int] = frozenset()

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
        kind = ZeroCenteredRMSNorm if self.zero_centered_norms else RMSNorm
        return kind(size, self.norm_eps)

    def new_residual_norm(self) -> RMSNorm | LayerNorm:
        """Returns a norm of the residual stream."""
        if self.layer_norms:
            return LayerNorm(self.hidden_size, self.norm_eps, has_bias=self.has_norm_biases)
        return self.new_norm(self.hidden_size)
