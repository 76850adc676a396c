"""The families: how each config is read, and what its weights are called.

Older families keep BERT's names, later ones (Jina, Nomic, GTE) have the names of `encoder`; the
names of checkpoints that were published before transformers had the class are read too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.layers import rotary_config
from mmdeploy_llm.weights.map import Target

from .encoder import EncoderConfig
from .model import EncoderModel, Renames, head_of

PREFIX = (r"^(bert|roberta|electra|distilbert|mpnet|nomic_bert|gte|new)\.", "")
# From the names of BERT's checkpoints to those of the modules.
BERT_NAMES = (
    PREFIX,
    (r"\.gamma$", ".weight"),  # of norms, in the first checkpoints
    (r"\.beta$", ".bias"),
    (r"^embeddings\.LayerNorm\.", "embeddings.norm."),
    (r"^encoder\.layer\.", "layers."),
    (r"^(layers\.\d+)\.attention\.self\.(query|key|value)\.", lambda m: _qkv(m[1], m[2][0])),
    (r"^(layers\.\d+)\.attention\.output\.dense\.", r"\1.self_attn.o_proj."),
    (r"^(layers\.\d+)\.attention\.output\.LayerNorm\.", r"\1.attention_norm."),
    (r"^(layers\.\d+)\.intermediate\.dense\.", r"\1.mlp.fc1."),
    (r"^(layers\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
    (r"^(layers\.\d+)\.output\.LayerNorm\.", r"\1.mlp_norm."),
    (r"^embeddings_project\.", "widen."),
)
# BERT reads its pooler before the classifier, RoBERTa has both matrices in its head.
HEAD_NAMES = (
    (r"^classifier\.out_proj\.", "head.out."),
    (r"^(classifier|pooler)\.dense\.", "head.dense."),
    (r"^pre_classifier\.", "head.dense."),
    (r"^classifier\.(weight|bias)$", r"head.out.\1"),
)
IN_ENCODER = ((r"^(embeddings|layers|widen)\.", r"encoder.\1."),)
DISTILBERT_NAMES = (
    PREFIX,
    (r"^embeddings\.LayerNorm\.", "embeddings.norm."),
    (r"^transformer\.layer\.", "layers."),
    (r"^(layers\.\d+)\.attention\.([qkv])_lin\.", lambda m: _qkv(m[1], m[2])),
    (r"^(layers\.\d+)\.attention\.out_lin\.", r"\1.self_attn.o_proj."),
    (r"^(layers\.\d+)\.sa_layer_norm\.", r"\1.attention_norm."),
    (r"^(layers\.\d+)\.ffn\.lin", r"\1.mlp.fc"),
    (r"^(layers\.\d+)\.output_layer_norm\.", r"\1.mlp_norm."),
)
ROTARY_NAMES = (
    PREFIX,
    (r"^(embeddings\.LayerNorm|emb_ln)\.", "embeddings.norm."),
    (r"^encoder\.layers?\.", "layers."),
    (r"^(layers\.\d+)\.(attn|mixer|attention)\.(Wqkv|qkv_proj)\.", r"\1.self_attn.qkv_proj."),
    (r"^(layers\.\d+)\.(attn|mixer|attention)\.(out_proj|o_proj)\.", r"\1.self_attn.o_proj."),
    (r"^(layers\.\d+)\.(post_attention_layernorm|norm1|attn_ln)\.", r"\1.attention_norm."),
    (r"^(layers\.\d+)\.(post_mlp_layernorm|norm2|mlp_ln)\.", r"\1.mlp_norm."),
    (r"^(layers\.\d+)\.mlp\.fc11\.", r"\1.mlp.up_proj."),
    (r"^(layers\.\d+)\.mlp\.fc12\.", r"\1.mlp.gate_proj."),
)
UP_GATE = re.compile(r"(^|\.)mlp\.up_gate_proj\.")


def _qkv(layer: str, first: str) -> str:
    """Returns our name of a matrix of attention by its first letter, q, k or v."""
    return f"{layer}.self_attn.{first}_proj."


def refuse_decoder(config: Any) -> None:
    """Raises ModelNotSupportedError for a config that makes the class a decoder, or gives it
    positions other than learned ones."""
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ModelNotSupportedError(
            f"is_decoder or add_cross_attention of this {config.model_type} model is set; it is "
            "supported as an encoder only"
        )
    kind = getattr(config, "position_embedding_type", None) or "absolute"
    if kind != "absolute":
        raise ModelNotSupportedError(
            f"position_embedding_type {kind!r:.40} of this {config.model_type} model is not "
            "supported, only 'absolute'"
        )


def encoder_config(config: Any, **options: Any) -> EncoderConfig:
    """Reads the sizes that most families share; options: the other fields, or other values."""
    shared = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": getattr(config, "intermediate_size", None),
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "norm_eps": getattr(config, "layer_norm_eps", None),
        "activation": getattr(config, "hidden_act", None),
        "num_types": getattr(config, "type_vocab_size", 0),
    }
    return EncoderConfig(**(shared | options))


class BertModel(EncoderModel):
    """transformers' BertModel and BertForSequenceClassification."""

    def __init__(self, config: Any) -> None:
        refuse_decoder(config)
        own = encoder_config(config, num_positions=config.max_position_embeddings)
        super().__init__(own, (*BERT_NAMES, *HEAD_NAMES, *IN_ENCODER), head_of(config))


class ElectraModel(EncoderModel):
    """transformers' ElectraModel, the discriminator, and its classifier."""

    def __init__(self, config: Any) -> None:
        refuse_decoder(config)
        own = encoder_config(
            config,
            num_positions=config.max_position_embeddings,
            embedding_size=config.embedding_size,
        )
        head = head_of(config, activation=F.gelu)
        super().__init__(own, (*BERT_NAMES, *HEAD_NAMES, *IN_ENCODER), head)


class RobertaModel(EncoderModel):
    """transformers' RobertaModel, XLMRobertaModel and CamembertModel, and their classifiers."""

    def __init__(self, config: Any) -> None:
        refuse_decoder(config)
        own = encoder_config(
            config,
            num_positions=config.max_position_embeddings,
            padding_id=config.pad_token_id,
        )
        super().__init__(own, (*BERT_NAMES, *HEAD_NAMES, *IN_ENCODER), head_of(config))


class DistilBertModel(EncoderModel):
    """transformers' DistilBertModel and its classifier."""

    def __init__(self, config: Any) -> None:
        own = encoder_config(
            config,
            intermediate_size=config.hidden_dim,
            norm_eps=1e-12,
            activation=config.activation,
            num_positions=config.max_position_embeddings,
            num_types=0,
        )
        names = (*DISTILBERT_NAMES, *HEAD_NAMES, *IN_ENCODER)
        super().__init__(own, names, head_of(config, activation=torch.relu))


class RotaryEncoder(EncoderModel):
    """The base of encoders with rotary positions: Jina's, Nomic's and GTE."""

    has_gate = False
    attention_bias = mlp_bias = down_bias = True
    names: Renames = ROTARY_NAMES

    def __init__(self, config: Any) -> None:
        own = encoder_config(
            config,
            rotary=rotary_config(config),
            has_gate=self.has_gate,
            attention_bias=self.attention_bias,
            mlp_bias=self.mlp_bias,
            down_bias=self.down_bias,
        )
        super().__init__(own, (*self.names, *HEAD_NAMES, *IN_ENCODER), head_of(config))


class JinaModel(RotaryEncoder):
    """transformers' JinaEmbeddingsV3Model and its classifier."""


class NomicBertModel(RotaryEncoder):
    """transformers' NomicBertModel and its classifier."""

    has_gate = True
    attention_bias = mlp_bias = down_bias = False
    names = (*ROTARY_NAMES, (r"\.mlp\.fc2\.", ".mlp.down_proj."))


class GteModel(RotaryEncoder):
    """transformers' GteModel and its classifier; published ones call themselves "new"."""

    has_gate = True
    mlp_bias = False

    def weight_targets(self, key: str) -> Sequence[Target] | None:
        """See hooks.Model. Published checkpoints have up and gate in one matrix, up first."""
        if not UP_GATE.search(key):
            return super().weight_targets(key)
        halves = []
        for place, name in enumerate(("up_proj", "gate_proj")):
            found = self.weight_map.targets(UP_GATE.sub(rf"\1mlp.{name}.", key))
            for target in found or ():
                assert target.rows is not None
                size = target.rows.stop - target.rows.start
                own = slice(place * size, (place + 1) * size)
                halves.append(Target(name=target.name, rows=target.rows, source=own))
        return tuple(halves) or None
