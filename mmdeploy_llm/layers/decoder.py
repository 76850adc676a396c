"""The standard decoder: embedding, layers of attention and MLP with pre-norms, final norm, logits.

    x = embed(ids)                       media embeddings replace their rows
    x = x + o(attend(rope(qkv(norm(x)))))
    x = x + mlp(norm(x))                 dense, sparse, or sparse by modality; per layer
    logits = head(norm(x))               head may be the embedding

Options add norms of q and k before rope, and norms after o and mlp. In a parallel decoder attention
and MLP read the same norm, or two: x = x + o(attend(rope(qkv(norm(x))))) + mlp(norm(x)).

Parameters have the names of transformers' checkpoints (embed_tokens, layers.N.self_attn.o_proj, ..)
with q, k, v and gate, up fused. Shapes: T tokens, H heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mmdeploy_llm.caches import LayerCache
from mmdeploy_llm.forward import (
    Alibi,
    AttentionContext,
    ForwardInputs,
    RotaryAttention,
    StateContext,
)
from mmdeploy_llm.layers.basic.kernel_layer import KernelLayer
from mmdeploy_llm.layers.basic.linear import (
    Embedding,
    Linear,
    MergedLinear,
    empty_parameter,
    keep_sums,
)
from mmdeploy_llm.layers.basic.mapped_weights import MappedWeights
from mmdeploy_llm.layers.basic.mlp import MLP, GatedMLP
from mmdeploy_llm.layers.basic.norm import LayerNorm, NoNorm, RMSNorm
from mmdeploy_llm.layers.basic.recordings import Recordings, can_record
from mmdeploy_llm.layers.basic.rotary import NoRope, Rope, Rotary
from mmdeploy_llm.layers.basic.softcap import Softcap
from mmdeploy_llm.request import MediaSpan

from .decoder_config import DecoderConfig
from .moe import Modality, ModalityMLP, SparseMLP


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderStep:
    """Values that all layers share in one forward pass.

    rotary_attn: `attn`, if it rotates q and k itself.
    states: see ForwardInputs. local_rope: of the layers with a window; None: `rope`.
    """

    rope: Rope
    attn: AttentionContext
    modality: Modality | None
    rotary_attn: RotaryAttention | None = None
    states: StateContext | None = None
    local_rope: Rope | None = None

    def rope_for(self, window: int | None) -> Rope:
        """Returns the rope of a layer with this window."""
        return self.rope if window is None or self.local_rope is None else self.local_rope


class Attention(nn.Module):
    """Grouped-query attention over the cached tokens of `step.attn`."""

    fp32_parameters = ("sinks",)
    head_values = ("sinks", "slopes")  # with one value for each query head
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.window = None if config.windows is None else config.windows[layer]
        self._options: Mapping[str, Any] = {
            "window": self.window,
            "scale": config.score_scale,
            "softcap": config.score_softcap,
        }
        self.own_rope = NoRope() if layer in config.nope_layers else None
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = MergedLinear(config.hidden_size, parts, bias=config.qkv_bias)
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.out_bias)
        self.q_norm = self.k_norm = None
        self.has_full_norms = config.has_full_qk_norm
        if config.has_full_qk_norm:
            self.q_norm, self.k_norm = config.new_norm(q_size), config.new_norm(kv_size)
        elif config.qk_norm:
            self.q_norm = config.new_norm(config.head_dim)
            self.k_norm = config.new_norm(config.head_dim)
        self.sinks = empty_parameter(config.num_heads) if config.has_sinks else None
        self.alibi = config.alibi
        self.slopes = None if config.alibi is None else config.alibi.slopes

    def init_buffers(self, device: torch.device) -> None:
        """Makes the tensor of the slopes, if there are some."""
        if self.alibi is not None:
            dtypes = {"bfloat16": torch.bfloat16, "model": self.qkv_proj.weight.dtype, None: None}
            slopes = torch.tensor(self.slopes, dtype=torch.float32, device=device)
            factor, dtype = self.alibi.factor, dtypes[self.alibi.rounds]
            biases = Alibi(slopes=slopes, factor=factor, dtype=dtype)
            self._options = {**self._options, "alibi": biases}

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of `attend` for this layer."""
        return self._options if self.sinks is None else {**self._options, "sinks": self.sinks}

    def forward(self, x: Tensor, step: DecoderStep) -> Tensor:
        """Computes attention with its projections, [T, hidden] -> [T, hidden]."""
        num_rotated = self.num_heads + self.num_kv_heads
        rope = self.own_rope or step.rope_for(self.window)
        qkv = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        if self.has_full_norms:
            qkv = self._normed(qkv)
        attended = None
        if step.rotary_attn is not None:
            attended = self._rotate_in(step.rotary_attn, qkv, rope)
        if attended is None:
            qk = self._rotated(qkv[:, :num_rotated], rope)
            q, k, v = qk[:, : self.num_heads], qk[:, self.num_heads :], qkv[:, num_rotated:]
            attended = step.attn.attend(self.layer, q, k, v, **self.options)
        out: Tensor = self.o_proj(attended.flatten(1))
        return out

    def _rotate_in(self, attn: RotaryAttention, qkv: Tensor, rope: Rope) -> Tensor | None:
        """Returns attention that norms and rotates q and k itself; None if the kernels do not
        accept them."""
        norms = None
        if self.q_norm is not None and self.k_norm is not None and not self.has_full_norms:
            norms = self.q_norm, self.k_norm
        rotary = rope.qk_rotary(qkv, norms)
        if rotary is None:
            return None
        q, k, v = torch.split(qkv, [self.num_heads, self.num_kv_heads, self.num_kv_heads], 1)
        return attn.attend(self.layer, q, k, v, rotary=rotary, **self.options)

    def _rotated(self, qk: Tensor, rope: Rope) -> Tensor:
        """Returns the heads `qk` [T, H + K, D] after norm, if heads have one, and rotation."""
        if self.q_norm is None or self.k_norm is None or self.has_full_norms:
            return rope.rotate(qk)
        return rope.norm_and_rotate(qk, self.num_heads, self.q_norm, self.k_norm)

    def _normed(self, qkv: Tensor) -> Tensor:
        """Returns `qkv` [T, H + 2 K, D] with all heads of q normed together, and all of k."""
        assert self.q_norm is not None
        assert self.k_norm is not None
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        parts = torch.split(qkv.view(qkv.shape[0], 1, -1), [q_size, kv_size, kv_size], 2)
        q, k = self.q_norm.of_heads(parts[0]), self.k_norm.of_heads(parts[1])
        is_in_place = q.data_ptr() == qkv.data_ptr()
        return qkv if is_in_place else torch.cat([q, k, parts[2]], 2).view_as(qkv)


class DecoderLayer(KernelLayer):
    """Attention and MLP, each after its norm, or both after one. The residual stream is passed on
    separately from the output, so that the next norm adds them."""

    mlp: GatedMLP | MLP | SparseMLP | ModalityMLP
    post_attention_layernorm: RMSNorm | LayerNorm | NoNorm | None
    post_self_attn_layernorm: RMSNorm | LayerNorm | None
    post_mlp_layernorm: RMSNorm | LayerNorm | None

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = config.new_input_norm()
        self.residual_scale = config.residual_scale
        self.is_parallel = config.is_parallel
        self.add_mixer(config, layer)
        self.post_attention_layernorm = None
        if not config.is_parallel or config.has_mlp_norm:
            self.post_attention_layernorm = config.new_input_norm()
        self.mlp = _make_mlp(config, layer)
        self.post_self_attn_layernorm = self.post_mlp_layernorm = None
        if config.post_norms:
            self.post_self_attn_layernorm = config.new_residual_norm()
            self.post_mlp_layernorm = config.new_residual_norm()

    def add_mixer(self, config: DecoderConfig, layer: int) -> None:
        """Adds the module that `mix` calls; a family whose layers mix tokens otherwise overrides
        both."""
        self.self_attn = Attention(config, layer)

    def mix(self, x: Tensor, step: DecoderStep) -> Tensor:
        """Mixes the tokens of each sequence, [T, hidden] -> [T, hidden]."""
        out: Tensor = self.self_attn(x, step)
        return out

    def forward(
        self, x: Tensor, residual: Tensor | None, step: DecoderStep
    ) -> tuple[Tensor, Tensor]:
        """Returns (output, residual stream), both [T, hidden], not yet added."""
        x, residual = self.input_layernorm.add(x, residual)
        mixed, norm = self.mix(x, step), self.post_self_attn_layernorm
        mixed = self._scaled(mixed if norm is None else norm(mixed))
        if self.is_parallel or self.post_attention_layernorm is None:
            x = self._parallel_input(x, mixed, residual)
        else:
            x, residual = self.post_attention_layernorm.add(mixed, residual)
        x = self.mlp(x, step.modality) if isinstance(self.mlp, ModalityMLP) else self.mlp(x)
        x = x if self.post_mlp_layernorm is None else self.post_mlp_layernorm(x)
        return self._scaled(x), residual

    def _parallel_input(self, x: Tensor, mixed: Tensor, residual: Tensor) -> Tensor:
        """Adds `mixed` to `residual`; returns what the MLP reads: the norm that attention reads, or
        its own of the same values."""
        if self.post_attention_layernorm is not None:
            x, _ = self.post_attention_layernorm.add(residual, None)
        self.kernels.add_rows(residual, mixed)
        return x

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.residual_scale == 1 else self.kernels.scale(x, self.residual_scale)


def _make_mlp(config: DecoderConfig, layer: int) -> GatedMLP | MLP | SparseMLP | ModalityMLP:
    if config.moe is None or layer not in config.moe_layers:
        size, inner = config.hidden_size, config.intermediate_size
        if not config.has_gate:
            return MLP(size, inner, size, config.activation, bias=config.mlp_bias)
        return GatedMLP(size, inner, bias=config.mlp_bias, activation=config.activation)
    moe = config.moe
    if moe.activation == "silu":  # the default
        moe = replace(moe, activation=config.activation)
    return (SparseMLP if moe.vision_intermediate_size is None else ModalityMLP)(
        config.hidden_size, moe
    )


# Builds a layer, called as DecoderLayer is: (x, residual, step) -> (output, residual stream).
NewLayer = Callable[[DecoderConfig, int], nn.Module]


class Decoder(KernelLayer):
    """Computes hidden states after the final norm from token ids and media embeddings.

    On the CPU the kernel calls of a small decode step, with drafts or without, are recorded once
    for each number of sequences and tokens, and replayed in one call.
    """

    def __init__(self, config: DecoderConfig, new_layer: NewLayer = DecoderLayer) -> None:
        """new_layer: builds the layer of an index; see NewLayer."""
        super().__init__()
        self._recordings = Recordings()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(new_layer(config, i) for i in range(config.num_layers))
        self.norm = config.new_residual_norm()
        self.rotary = Rotary(config.rotary)
        self.local_rotary = None if config.local_rotary is None else Rotary(config.local_rotary)
        self.embed_scale = config.embed_scale
        self.embed_positions = self.embed_norm = None
        self.is_placed = config.num_positions > 0 or config.has_embed_norm
        if config.num_positions:
            self.embed_positions = Embedding(config.num_positions, config.hidden_size)
        if config.has_embed_norm:
            self.embed_norm = config.new_residual_norm()

    def forward(self, inputs: ForwardInputs, is_vision: Tensor | None = None) -> Tensor:
        """Returns [T, hidden]. is_vision: [T] bool, tokens for the vision experts of
        modality-routed layers."""
        if not self.kernels.is_compiled or is_vision is not None or not can_record(inputs):
            return self._compute(inputs, is_vision)
        return self._recordings.run(inputs, self.kernels, lambda own: self._compute(own, None))

    def _compute(self, inputs: ForwardInputs, is_vision: Tensor | None) -> Tensor:
        """Looks up the embeddings and runs all layers and the final norm."""
        x = self.embedded(inputs)
        step = self.begin(inputs, x, is_vision)
        residual, rows = None, inputs.media_rows
        features = inputs.media_features(x.shape[1])
        for index, layer in enumerate(self.layers):
            x, residual = layer(x, residual, step)
            if rows is not None and index < len(features):
                x = x.index_add_(0, rows, features[index].to(x.dtype))
        out, _ = self.norm.add(x, residual)
        return out

    def embedded(self, inputs: ForwardInputs) -> Tensor:
        """Returns the embeddings of tokens and media, [T, hidden]."""
        embeds: Tensor = self.embed_tokens(inputs.token_ids)
        if self.embed_scale != 1:
            embeds = self.kernels.scale(embeds, self.embed_scale, rounds=True)
        return inputs.merge_media(self._placed(embeds, inputs) if self.is_placed else embeds)

    def _placed(self, embeds: Tensor, inputs: ForwardInputs) -> Tensor:
        """Adds the embeddings of the positions, and norms, where the model does."""
        if self.embed_positions is not None:
            embeds = self.kernels.add_rows(embeds, self.embed_positions(inputs.positions))
        return embeds if self.embed_norm is None else self.embed_norm(embeds)

    def begin(self, inputs: ForwardInputs, x: Tensor, is_vision: Tensor | None) -> DecoderStep:
        """Returns what all layers share; a family may add to it. x: embeddings [T, hidden]."""
        del x
        return DecoderStep(
            rope=self.rotary(inputs.positions, inputs.is_long),
            local_rope=self.local_rotary(inputs.positions) if self.local_rotary else None,
            attn=inputs.attn,
            modality=None if is_vision is None else Modality(is_vision),
            rotary_attn=self._rotary_attn(inputs.attn),
            states=inputs.states,
        )

    def _rotary_attn(self, attn: AttentionContext) -> RotaryAttention | None:
        """Returns `attn` if it rotates q and k by the kernels that the layers use."""
        if not self.kernels.is_compiled or not isinstance(attn, RotaryAttention):
            return None
        return attn if attn.can_rotate else None


class CausalLM(MappedWeights, nn.Module):
    """Decoder and output head, with the attributes that a Model must have.

    A plugin's model subclasses it and sets `weight_map`; a model with media also adds
    `encode_media`, and `positions` if these differ from the token indices.
    """

    is_embedder = False  # where it is, it has no output head, and its embedding is none

    def __init__(
        self,
        config: DecoderConfig,
        new_layer: NewLayer = DecoderLayer,
        new_decoder: Callable[[DecoderConfig, NewLayer], Decoder] = Decoder,
    ) -> None:
        """new_layer: see Decoder. new_decoder: builds the decoder of both."""
        super().__init__()
        self.model = new_decoder(config, new_layer)
        self.lm_head = None
        if not config.is_tied:
            size = config.hidden_size
            self.lm_head = Linear(size, config.vocab_size, bias=config.head_bias)
        if not self.is_embedder:
            keep_sums(self.lm_head or self.model.embed_tokens)
        self.num_layers = config.num_layers
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.has_sinks, self.has_alibi = config.has_sinks, config.alibi is not None
        self.has_softcaps = config.score_softcap is not None
        if config.windows is not None and any(config.windows):
            self.cache: Sequence[LayerCache] = config.caches
        self.long_after = config.rotary.long_after
        self.logit_scale, cap = config.logit_scale, config.logit_softcap
        self.softcap = None if cap is None else Softcap(cap)
        self.sizes = config
        self.draft_head: nn.Module | None = None  # see drafts.add_draft_head

    @property
    def text_layers(self) -> Sequence[nn.Module]:
        """See hooks.Model."""
        drafts = () if self.draft_head is None else (self.draft_head,)
        return (*self.model.layers, *drafts)

    @property
    def tied_head(self) -> Embedding | None:
        """The embedding that is the output head too."""
        has_own = self.lm_head is not None or self.is_embedder
        return None if has_own else self.model.embed_tokens

    def positions(self, num_tokens: int, media: Sequence[MediaSpan]) -> Tensor | None:
        """Returns None: token i is at position i."""
        return None

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Returns hidden states after the final norm, [T, hidden]."""
        out: Tensor = self.model(inputs)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Multiplies by the output head, [N, hidden] -> [N, vocab] float32."""
        head = self.model.embed_tokens.product if self.lm_head is None else self.lm_head
        logits: Tensor = head(hidden)
        if self.logit_scale != 1:
            logits = self.model.kernels.scale(logits, self.logit_scale)
        return logits if self.softcap is None else self.softcap(logits)
