"""Reads GGUF files of the vision tower of InternVL, beside a text model of Qwen."""

from __future__ import annotations

from mmdeploy_llm.weights.gguf.tables import (
    GGUFTable,
    MediaModel,
    Metadata,
    Tower,
    Values,
    check_activation,
    merge_size,
    side,
    tower_sizes,
)

PROJECTOR = "model.multi_modal_projector"


def _internvl(metadata: Metadata, text: Values) -> tuple[Values, Values]:
    del text
    size, depth, num_heads = tower_sizes(metadata)
    length = side(metadata, "image_size")
    merge = merge_size(metadata, "projector.scale_factor")
    num_patches = length // side(metadata, "patch_size")
    vision = {
        "hidden_size": size,
        "num_hidden_layers": depth,
        "num_attention_heads": num_heads,
        "intermediate_size": metadata.whole("vision.feed_forward_length"),
        "image_size": [length, length],
        "patch_size": [side(metadata, "patch_size")] * 2,
        "layer_norm_eps": metadata.number("vision.attention.layer_norm_epsilon"),
        "hidden_act": check_activation(metadata, "gelu"),
        "attention_bias": "v.blk.0.attn_q.bias" in metadata.tensors,
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in metadata.tensors,
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in metadata.tensors else "rms_norm",
        "use_mean_pooling": True,  # there is no norm after the last layer
        "downsample_ratio": 1 / merge,
        "image_seq_length": max(1, num_patches // merge) ** 2,
    }
    image: Values = {"size": {"height": length, "width": length}}
    names = {"min_patches": "vision.preproc_min_tiles", "max_patches": "vision.preproc_max_tiles"}
    image |= {name: metadata.whole(key) for name, key in names.items() if metadata.has(key)}
    return vision, image


TABLE = GGUFTable(
    towers={
        "internvl": Tower(
            models={
                name: MediaModel(model_type="internvl", model="InternVLForConditionalGeneration")
                for name in ("qwen2", "qwen3", "qwen3moe")
            },
            config=_internvl,
            last="mm.model.mlp.3.weight",
            tokens={"image_token_id": "<IMG_CONTEXT>"},
            outer=frozenset({"downsample_ratio", "image_seq_length"}),
            names={
                "mm.model.mlp.0": f"{PROJECTOR}.layer_norm",
                "mm.model.mlp.1": f"{PROJECTOR}.linear_1",
                "mm.model.mlp.3": f"{PROJECTOR}.linear_2",
            },
            num_axes={"v.class_embd": 3, "v.position_embd.weight": 3},
        )
    }
)
