"""The decoder of Gemma 4. It differs from Gemma 3's in these points:

layers with a window     heads of their own size, their own rope; in large models the tokens of an
                         image see each other in both directions
layers without           larger heads; rope turns a quarter of the channels; v may be k's projection
the last layers          read the keys and values of an earlier layer of the same kind
values                   normed, without a weight
after every layer        adds a small embedding of the token, made for this layer (PLE); then
                         multiplies by a learned number

Shapes: T tokens, L layers, P channels of a per-layer embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from mmdeploy_llm.caches import LayerCache, PagedKV, SharedKV
from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.forward import AttentionContext, ForwardInputs
from mmdeploy_llm.layers import (
    Activation,
    Attention,
    Decoder,
    DecoderConfig,
    DecoderLayer,
    DecoderStep,
    Embedding,
    Experts,
    KernelLayer,
    LateRMSNorm,
    Linear,
    MergedLinear,
    MoEConfig,
    NewLayer,
    RotaryConfig,
    SoftmaxRouter,
    layer_windows,
)

from .text import ACTIVATION

GLOBAL, LOCAL = "full_attention", "sliding_attention"
ROPE_TYPES: Final = ("default", "proportional")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Step(DecoderStep):
    """per_layer: [T, L, P], the embeddings that are added after each layer; None: none are.
    global_attn: of the layers without a window, whose tokens of media see earlier tokens only."""

    per_layer: Tensor | None
    global_attn: AttentionContext


class UnweightedNorm(KernelLayer):
    """RMSNorm without a weight."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Returns norm(x) over the last axis, of the shape and dtype of `x`."""
        return self.kernels.normed_heads(x, self.eps)


class Gemma4Attention(Attention):
    """Attention with normed values. In the last layers it has queries only."""

    def __init__(self, config: DecoderConfig, layer: int, *, text: Any) -> None:
        """config: with the sizes of this layer."""
        super().__init__(config, layer)
        self.is_reader = owner_of(text, layer) is not None
        is_global = self.window is None
        self.has_values = not self.is_reader and not (text.attention_k_eq_v and is_global)
        q_size, kv_size = (n * self.head_dim for n in (self.num_heads, self.num_kv_heads))
        parts = {"q_proj": q_size}
        if not self.is_reader:
            parts["k_proj"] = kv_size
        if self.has_values:
            parts["v_proj"] = kv_size
        self.qkv_proj = MergedLinear(config.hidden_size, parts, bias=config.qkv_bias)
        if self.is_reader:
            self.k_norm = None
        self.v_norm = UnweightedNorm(config.norm_eps)

    def forward(self, x: Tensor, step: DecoderStep) -> Tensor:
        """Computes attention with its projections, [T, hidden] -> [T, hidden]."""
        rope = step.rope_for(self.window)
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        q, k, v = heads[:, : self.num_heads], None, None
        assert self.q_norm is not None, "every layer norms its queries"
        if self.k_norm is None:
            q = rope.rotate(self.q_norm(q))
        else:
            num_rotated = self.num_heads + self.num_kv_heads
            v = self.v_norm(heads[:, num_rotated if self.has_values else self.num_heads :])
            qk = rope.norm_and_rotate(
                heads[:, :num_rotated], self.num_heads, self.q_norm, self.k_norm
            )
            q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        attn = step.attn if self.window is not None else cast(Gemma4Step, step).global_attn
        out: Tensor = self.o_proj(attn.attend(self.layer, q, k, v, **self.options).flatten(1))
        return out


class Gemma4Layer(DecoderLayer):
    """A decoder layer, with experts beside its MLP in some models, followed by the embedding for
    this layer and a factor."""

    post_attention_layernorm: LateRMSNorm
    post_self_attn_layernorm: LateRMSNorm
    post_mlp_layernorm: LateRMSNorm

    def __init__(self, config: DecoderConfig, layer: int, *, text: Any) -> None:
        """config: of the whole decoder. text: transformers' text config."""
        self._text, self._layer = text, layer
        super().__init__(layer_config(config, text, layer), layer)
        self.layer_scalar = nn.Parameter(torch.empty(1), requires_grad=False)
        self.router = None
        if getattr(text, "enable_moe_block", False):  # the Unified has neither
            sizes = text.num_experts, config.hidden_size, text.moe_intermediate_size
            self.router, self.experts = Gemma4Router(config, text), Experts(*sizes, ACTIVATION)
            self.post_feedforward_layernorm_1 = config.new_norm(config.hidden_size)
            self.post_feedforward_layernorm_2 = config.new_norm(config.hidden_size)
            self.pre_feedforward_layernorm_2 = config.new_norm(config.hidden_size)
        if per_layer_size(text):
            size, own = config.hidden_size, per_layer_size(text)
            self.per_layer_input_gate = Linear(size, own)
            self.per_layer_activation = Activation(ACTIVATION)
            self.per_layer_projection = Linear(own, size)
            self.post_per_layer_input_norm = LateRMSNorm(size, config.norm_eps)

    def add_mixer(self, config: DecoderConfig, layer: int) -> None:
        """See DecoderLayer."""
        self.self_attn = Gemma4Attention(config, layer, text=self._text)

    def forward(  # type: ignore[override]  # the output is the whole residual stream
        self, x: Tensor, residual: Tensor | None, step: DecoderStep
    ) -> tuple[Tensor, None]:
        """Returns (residual stream [T, hidden], None)."""
        x, residual = self.input_layernorm.add(x, residual)
        x = self.post_self_attn_layernorm(self.mix(x, step))
        x, residual = self.post_attention_layernorm.add(x, residual)
        x = self.mlp(x)
        if self.router is not None:
            x = self._with_experts(self.post_feedforward_layernorm_1(x), residual)
        per_layer = cast(Gemma4Step, step).per_layer
        if per_layer is None:
            return self.post_mlp_layernorm.add_to(residual, x, self.layer_scalar), None
        x = self.post_mlp_layernorm.add_to(residual, x)
        gate = self.per_layer_input_gate(x)
        own = self.per_layer_activation.times(gate, per_layer[:, self._layer])
        own = self.per_layer_projection(own)
        return self.post_per_layer_input_norm.add_to(x, own, self.layer_scalar), None

    def _with_experts(self, x: Tensor, stream: Tensor) -> Tensor:
        """Adds the normed sum of experts to `x`. The stream itself routes and is what they read."""
        assert self.router is not None, "asked before"
        weights, experts = self.router(stream)
        out = self.experts(self.pre_feedforward_layernorm_2(stream), weights, experts)
        return self.post_feedforward_layernorm_2.add_to(x, out)


class Gemma4Router(KernelLayer):
    """Chooses the most probable experts for normed and scaled inputs; each has a learned factor on
    its weight."""

    def __init__(self, config: DecoderConfig, text: Any) -> None:
        super().__init__()
        size, num_experts = config.hidden_size, text.num_experts
        options = MoEConfig(
            num_experts=num_experts,
            top_k=text.top_k_experts,
            intermediate_size=text.moe_intermediate_size,
            rounds_weights=False,
        )
        self.norm = LateRMSNorm(size, config.norm_eps)
        self.proj = SoftmaxRouter(size, options)
        self.per_expert_scale = nn.Parameter(torch.empty(num_experts), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Routes x [T, hidden]: weights [T, k] in float32, expert ids [T, k]."""
        normed = self.kernels.scale(self.norm(x), x.shape[1] ** -0.5)
        weights, experts = self.proj(normed, self.per_expert_scale)
        return weights, experts


class Gemma4Decoder(Decoder):
    """The decoder with the table of embeddings for layers. media_ids: tokens that stand for media,
    and take the padding token's embeddings for layers."""

    def __init__(self, config: DecoderConfig, new_layer: NewLayer, *, text: Any) -> None:
        super().__init__(config, new_layer)
        self.num_layers, self.per_layer_size = config.num_layers, per_layer_size(text)
        self.padding_id = padding_id(text)
        self.sees_ahead = text.use_bidirectional_attention == "vision"
        self.media_ids: Sequence[int] = ()
        self.embed_tokens_per_layer = self.per_layer_model_projection = None
        if self.per_layer_size:
            size = self.num_layers * self.per_layer_size
            self.embed_tokens_per_layer = Embedding(text.vocab_size_per_layer_input, size)
            self.per_layer_model_projection = Linear(config.hidden_size, size)
            self.per_layer_projection_norm = LateRMSNorm(self.per_layer_size, config.norm_eps)

    def begin(self, inputs: ForwardInputs, x: Tensor, is_vision: Tensor | None) -> DecoderStep:
        """See Decoder."""
        step = super().begin(inputs, x, is_vision)
        values = {field.name: getattr(step, field.name) for field in fields(step)}
        values["global_attn"] = causal = inputs.attn.causal()
        if not self.sees_ahead:  # small models
            values["attn"] = causal
        return Gemma4Step(**values, per_layer=self._per_layer(inputs.token_ids, x))

    def _per_layer(self, token_ids: Tensor, x: Tensor) -> Tensor | None:
        """Returns the embeddings for layers [T, L, P]: of the token, and of its embedding in the
        decoder, which is `x`."""
        if self.embed_tokens_per_layer is None or self.per_layer_model_projection is None:
            return None
        size, kernels = self.per_layer_size, self.kernels
        for media_id in self.media_ids:
            token_ids = kernels.replace_id(token_ids, media_id, self.padding_id)
        of_token = kernels.scale(self.embed_tokens_per_layer(token_ids), size**0.5, rounds=True)
        projected = kernels.scale(self.per_layer_model_projection(x), x.shape[1] ** -0.5)
        rows = of_token.view(-1, size), projected.view(-1, size)
        joined = kernels.scale(self.per_layer_projection_norm.add_to(*rows), 2**-0.5)
        return joined.view(-1, self.num_layers, size)


def per_layer_size(text: Any) -> int:
    """Returns the channels of an embedding for a layer; 0 for a model without them."""
    return int(getattr(text, "hidden_size_per_layer_input", 0) or 0)


def padding_id(text: Any) -> int:
    """Returns the id whose embeddings for layers media tokens take. Raises ModelNotSupportedError
    where the table of these embeddings lacks that id, or ids that the model can generate."""
    rows: dict[str, int] = {
        "pad_token_id": text.pad_token_id or 0,
        "vocab_size": text.vocab_size - 1,
    }
    for name, last in rows.items():
        if per_layer_size(text) and not 0 <= last < text.vocab_size_per_layer_input:
            raise ModelNotSupportedError(
                f"{name} = {getattr(text, name)} of this {text.model_type} model is beyond its "
                f"embeddings for layers, vocab_size_per_layer_input = "
                f"{text.vocab_size_per_layer_input}"
            )
    return rows["pad_token_id"]


def owner_of(text: Any, layer: int) -> int | None:
    """Returns the layer whose keys and values this one reads: the last one of the same kind that
    stores some; None for a layer that stores its own.

    Raises ModelNotSupportedError if there is none to read.
    """
    num_own = text.num_hidden_layers - text.num_kv_shared_layers
    if layer < num_own:
        return None
    kinds = text.layer_types
    owners = [index for index in range(num_own) if kinds[index] == kinds[layer]]
    if not owners:
        raise ModelNotSupportedError(
            f"num_kv_shared_layers = {text.num_kv_shared_layers} of this {text.model_type} model "
            f"leaves no {kinds[layer]} layer that stores keys and values"
        )
    return owners[-1]


def layer_config(config: DecoderConfig, text: Any, layer: int) -> DecoderConfig:
    """Returns the sizes of one layer: of its heads, and of its MLP."""
    own = text.per_layer_config[layer]
    rotary = config.rotary if text.layer_types[layer] == GLOBAL else config.local_rotary
    assert rotary is not None, "both kinds have a rope"
    is_wide = text.use_double_wide_mlp and owner_of(text, layer) is not None
    return replace(
        config,
        rotary=rotary,
        num_kv_heads=own.num_key_value_heads,
        intermediate_size=config.intermediate_size * (2 if is_wide else 1),
    )


def decoder_config(text: Any, *, is_tied: bool) -> DecoderConfig:
    """Converts a text config, with the sizes of layers without a window. Raises
    ModelNotSupportedError for options that this decoder does not have."""
    allowed = {
        "hidden_activation": (ACTIVATION,),
        "use_bidirectional_attention": (None, "vision"),
    }
    check_options(text, allowed)
    last = text.per_layer_config[GLOBAL]
    return DecoderConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_layers=text.num_hidden_layers,
        num_heads=text.num_attention_heads,
        num_kv_heads=last.num_key_value_heads,
        rotary=_rotary(text, GLOBAL),
        local_rotary=_rotary(text, LOCAL),
        norm_eps=text.rms_norm_eps,
        qkv_bias=text.attention_bias,
        out_bias=text.attention_bias,
        is_tied=is_tied,
        qk_norm=True,
        post_norms=True,
        rounds_norms_late=True,
        windows=layer_windows(text),
        activation=ACTIVATION,
        embed_scale=text.hidden_size**0.5,
        score_scale=1.0,
        logit_softcap=text.final_logit_softcapping,
    )


def check_options(config: Any, allowed: Mapping[str, Sequence[Any]]) -> None:
    """Raises ModelNotSupportedError for an option with a value that is not allowed."""
    for name, values in allowed.items():
        if getattr(config, name) not in values:
            raise ModelNotSupportedError(
                f"{name} = {getattr(config, name)!r} of this {config.model_type} model is not "
                f"supported, only {' and '.join(map(repr, values))}"
            )


def _rotary(text: Any, kind: str) -> RotaryConfig:
    """Converts the rope of one kind of layers."""
    rope, head_dim = text.rope_parameters[kind], text.per_layer_config[kind].head_dim
    if rope["rope_type"] not in ROPE_TYPES:
        raise ModelNotSupportedError(
            f"rope_type {rope['rope_type']!r} of {kind} layers is not supported, only "
            f"{' and '.join(ROPE_TYPES)}"
        )
    theta, frequencies = rope["rope_theta"], None
    if rope["rope_type"] == "proportional":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        with torch.device("cpu"):  # the model itself is built on "meta"
            make = ROPE_INIT_FUNCTIONS["proportional"]
            values, _ = make(text, device="cpu", layer_type=kind)
        frequencies = tuple(values.tolist())  # 0 for channels that are not turned
    return RotaryConfig(head_dim=head_dim, theta=theta, frequencies=frequencies)


def layer_cache(text: Any) -> Sequence[LayerCache]:
    """Returns what each layer keeps."""
    found: list[LayerCache] = []
    for layer, kind in enumerate(text.layer_types):
        owner, own = owner_of(text, layer), text.per_layer_config[layer]
        window = text.sliding_window if kind == LOCAL else None
        kept = PagedKV(num_kv_heads=own.num_key_value_heads, head_dim=own.head_dim, window=window)
        found.append(kept if owner is None else SharedKV(layer=owner))
    return tuple(found)


def new_layer(text: Any) -> NewLayer:
    """Returns what builds a layer of a text config."""
    return partial(Gemma4Layer, text=text)
