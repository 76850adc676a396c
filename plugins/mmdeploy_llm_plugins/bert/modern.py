"""ModernBERT: norms first, rotary positions, and in most layers a window of tokens around each."""

from __future__ import annotations

from typing import Any

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.layers import Activation, RotaryConfig

from .encoder import EncoderConfig, activation_of
from .families import encoder_config
from .model import EncoderModel, head_of

RENAMES = (
    (r"^model\.", ""),
    (r"^embeddings\.tok_embeddings\.", "encoder.embeddings.word_embeddings."),
    (r"^embeddings\.norm\.", "encoder.embeddings.norm."),
    (r"^final_norm\.", "encoder.final_norm."),
    (r"^layers\.(\d+)\.attn_norm\.", r"encoder.layers.\1.attention_norm."),
    (r"^layers\.(\d+)\.mlp_norm\.", r"encoder.layers.\1.mlp_norm."),
    (r"^layers\.(\d+)\.attn\.Wqkv\.", r"encoder.layers.\1.self_attn.qkv_proj."),
    (r"^layers\.(\d+)\.attn\.Wo\.", r"encoder.layers.\1.self_attn.o_proj."),
    # The first half of Wi goes through the activation, as our gate does.
    (r"^layers\.(\d+)\.mlp\.Wi\.", r"encoder.layers.\1.mlp.gate_up_proj."),
    (r"^layers\.(\d+)\.mlp\.Wo\.", r"encoder.layers.\1.mlp.down_proj."),
    (r"^classifier\.", "head.out."),
)
LOCAL = "sliding_attention"
UNUSED = r"^(decoder|head)\."  # of the pre-training, in a checkpoint that does not classify


def modern_config(config: Any) -> EncoderConfig:
    """Converts a config of ModernBERT."""
    return encoder_config(
        config,
        norm_eps=config.norm_eps,
        norm_bias=config.norm_bias,
        activation=config.hidden_activation,
        num_types=0,
        norms_first=True,
        has_gate=True,
        mlp_bias=config.mlp_bias,
        down_bias=config.mlp_bias,
        attention_bias=config.attention_bias,
        windows=tuple(_window(config, kind) for kind in config.layer_types),
        rotary=_rotary(config, "full_attention"),
        local_rotary=_rotary(config, LOCAL),
    )


def _window(config: Any, kind: str) -> int | None:
    """Returns the window of a layer of this kind."""
    return int(config.local_attention) if kind == LOCAL else None


def _rotary(config: Any, kind: str) -> RotaryConfig:
    """Returns the rotary embedding of the layers of this kind. Raises ModelNotSupportedError for a
    scaled one."""
    rope = config.rope_parameters[kind]
    if rope.get("rope_type", "default") != "default":
        raise ModelNotSupportedError(
            f"rope_type {rope['rope_type']!r:.40} of this modernbert model is not supported, only "
            "'default'"
        )
    size = config.hidden_size // config.num_attention_heads
    return RotaryConfig(head_dim=size, theta=float(rope["rope_theta"]))


class ModernBertModel(EncoderModel):
    """transformers' ModernBertModel and ModernBertForSequenceClassification."""

    def __init__(self, config: Any) -> None:
        head = head_of(
            config,
            activation=Activation(activation_of(config.classifier_activation)),
            dense_bias=config.classifier_bias,
            has_norm=True,
            pooling=config.classifier_pooling,
        )
        unused = (UNUSED,) if head is None else ()
        super().__init__(modern_config(config), RENAMES, head, ignored=unused)
