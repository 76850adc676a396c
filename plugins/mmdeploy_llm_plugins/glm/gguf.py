"""Reads GGUF files of GLM-4 and GLM-4V."""

from __future__ import annotations

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.weights.gguf.tables import (
    MAX_HEAD_DIM,
    Change,
    GGUFTable,
    MediaModel,
    Metadata,
    Order,
    OrderOf,
    StoredTensor,
    TextModel,
    Tower,
    Values,
    check_activation,
    grid_image,
    has_biases,
    head_dim,
    merge_size,
    rope_parameters,
    rope_sections,
    side,
    tower_sizes,
)


def _glm4(metadata: Metadata) -> Values:
    shared = rope_parameters(metadata, head_dim(metadata))
    return {
        "attention_bias": has_biases(metadata, "attn_q"),
        "rope_parameters": shared | rope_sections(metadata),
    }


def _glm4v(metadata: Metadata, text: Values) -> tuple[Values, Values]:
    size, depth, num_heads = tower_sizes(metadata)
    vision = {
        "depth": depth,
        "hidden_size": size,
        "num_heads": num_heads,
        "image_size": side(metadata, "image_size"),
        "intermediate_size": metadata.whole("vision.feed_forward_length"),
        "out_hidden_size": text["hidden_size"],
        "hidden_act": check_activation(metadata, "silu"),
        "rms_norm_eps": metadata.number("vision.attention.layer_norm_epsilon"),
        "spatial_merge_size": merge_size(metadata),
        "attention_bias": "v.blk.0.attn_qkv.bias" in metadata.tensors,
    }
    return vision, grid_image(metadata)


def _rotated_pairs(key: str) -> OrderOf:
    """Returns the order of heads whose adjacent channels transformers rotates, and which became the
    halves that llama.cpp rotates; the channels after them stayed. Only models with sections of
    rotary channels are changed. key: of the metadata, for the number of heads."""

    def order(metadata: Metadata, tensor: StoredTensor) -> Order | None:
        if not metadata.has("rope.dimension_sections"):
            return None
        heads = metadata.most(key, metadata.whole("attention.head_count"))
        num_rows = tensor.shape[0]
        size = num_rows // heads
        rotary_dim = metadata.whole("rope.dimension_count", max(1, size), high=MAX_HEAD_DIM)
        if num_rows % heads or rotary_dim > size or rotary_dim % 2:
            raise CheckpointError(
                f"{tensor.name} of {metadata.header.paths[0]} has {num_rows} rows, which are not "
                f"{heads} heads whose first {rotary_dim} rows are pairs"
            )
        return Order(first=rotary_dim // 2, second=2, rest=size - rotary_dim)

    return order


TABLE = GGUFTable(
    models={
        "glm4": TextModel(
            model_type="glm4",
            model="Glm4ForCausalLM",
            config=_glm4,
            changes={
                "attn_q.*": Change(rows=_rotated_pairs("attention.head_count")),
                "attn_k.*": Change(rows=_rotated_pairs("attention.head_count_kv")),
            },
            # Gate and up projection in one, which the package `gguf` knows by another name first.
            names={"blk.{bid}.ffn_up": "model.layers.{bid}.mlp.gate_up_proj"},
        )
    },
    towers={
        "glm4v": Tower(
            models={
                "glm4": MediaModel(
                    model_type="glm4v",
                    model="Glm4vForConditionalGeneration",
                    text_type="glm4v_text",
                )
            },
            config=_glm4v,
            last="mm.down.weight",
            tokens={
                "image_token_id": "<|image|>",
                "video_token_id": "<|video|>",
                "image_start_token_id": "<|begin_of_image|>",
                "image_end_token_id": "<|end_of_image|>",
                "video_start_token_id": "<|begin_of_video|>",
                "video_end_token_id": "<|end_of_video|>",
            },
            names={"v.patch_embd.weight.1": "model.visual.patch_embed.proj.weight"},
            patches="frames",
        )
    },
)
