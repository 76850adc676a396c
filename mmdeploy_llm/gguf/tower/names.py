"""The vision towers that are read from `mmproj` files: how GGUF names their tensors, and which
image-text models they make with which text models.

The names and changes are those of llama.cpp's conversion/*.py (its converter of gguf 0.19); a test
compares the names with the tables of the package `gguf`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.gguf.families import TOWER
from mmdeploy_llm.gguf.header import Header

BLOCK = {"ln1": "norm1", "ln2": "norm2", "attn_qkv": "attn.qkv", "attn_out": "attn.proj"}
GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
MERGER = "model.visual.merger"
QWEN2_OUTER = {
    "v.post_ln": f"{MERGER}.ln_q",
    "mm.0": f"{MERGER}.mlp.0",
    "mm.2": f"{MERGER}.mlp.2",
}
GLM_OUTER = {
    "v.patch_embd": "model.visual.patch_embed.proj",
    "v.position_embd": "model.visual.embeddings.position_embedding",
    "v.norm_embd": "model.visual.post_conv_layernorm",
    "v.post_ln": "model.visual.post_layernorm",
    "mm.patch_merger": "model.visual.downsample",
    "mm.model.fc": f"{MERGER}.proj",
    "mm.post_norm": f"{MERGER}.post_projection_norm",
    "mm.gate": f"{MERGER}.gate_proj",
    "mm.up": f"{MERGER}.up_proj",
    "mm.down": f"{MERGER}.down_proj",
}
SIGLIP = "model.vision_tower.vision_model"
PROJECTOR = "model.multi_modal_projector"
INTERN = GEMMA = "model.vision_tower"
QWEN_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
GLM_TOKENS = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """An image-text model of transformers. text_type: model_type of its text config; "": as the
    text model has it alone."""

    model_type: str
    model: str
    text_type: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """One kind of vision tower, a value of clip.projector_type.

    models: general.architecture of the text model -> what both are together.
    layers: where transformers keeps the layers. layer: names within "v.blk.N." -> names within a
        layer. outer: names outside -> whole names; all without ".weight" and ".bias".
    whole: whole names on both sides, for those which have no such ending in transformers.
    qkv: name of the matrix in a layer that the converter split into queries, keys and values.
    has_frames: whether it split the convolution over two frames.
    has_taps: whether features of inner layers go to the decoder too.
    has_rows: whether it made a convolution of the matrix that takes the pixels of a patch.
    new_axes: tensors from which it removed axes of size 1 at the front -> their number.
    clipped: linear layers whose inputs and outputs have bounds, in the names of transformers.
    has_sounds: whether an encoder of sounds may follow, which is not used.
    last: the tensor whose rows are channels of the decoder.
    tokens: fields of the config -> texts of the tokens.
    """

    models: Mapping[str, Model]
    layers: str
    layer: Mapping[str, str]
    outer: Mapping[str, str]
    last: str
    tokens: Mapping[str, str]
    whole: Mapping[str, str] = field(default_factory=dict)
    qkv: str = ""
    has_frames: bool = False
    has_taps: bool = False
    has_rows: bool = False
    new_axes: Mapping[str, int] = field(default_factory=dict)
    clipped: Mapping[str, str] = field(default_factory=dict)
    has_sounds: bool = False


def _qwen2(name: str, model_type: str, mlp: Mapping[str, str]) -> Tower:
    return Tower(
        models={
            "qwen2vl": Model(model_type=model_type, model=name, text_type=f"{model_type}_text")
        },
        layers="model.visual.blocks",
        layer={**BLOCK, **mlp},
        outer={"v.patch_embd": "model.visual.patch_embed.proj", **QWEN2_OUTER},
        last="mm.2.weight",
        tokens=QWEN_TOKENS,
        qkv="attn.qkv",
        has_frames=True,
    )


TOWERS: Mapping[str, Tower] = MappingProxyType(
    {
        "qwen2vl_merger": _qwen2(
            "Qwen2VLForConditionalGeneration",
            "qwen2_vl",
            {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        ),
        "qwen2.5vl_merger": _qwen2("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", GATED),
        "qwen3vl_merger": Tower(
            models={
                "qwen3vl": Model(model_type="qwen3_vl", model="Qwen3VLForConditionalGeneration"),
                "qwen3vlmoe": Model(
                    model_type="qwen3_vl_moe", model="Qwen3VLMoeForConditionalGeneration"
                ),
                "qwen35": Model(model_type="qwen3_5", model="Qwen3_5ForConditionalGeneration"),
                "qwen35moe": Model(
                    model_type="qwen3_5_moe", model="Qwen3_5MoeForConditionalGeneration"
                ),
            },
            layers="model.visual.blocks",
            layer={**BLOCK, "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
            outer={
                "v.patch_embd": "model.visual.patch_embed.proj",
                "v.position_embd": "model.visual.pos_embed",
                "v.post_ln": f"{MERGER}.norm",
                "mm.0": f"{MERGER}.linear_fc1",
                "mm.2": f"{MERGER}.linear_fc2",
            },
            last="mm.2.weight",
            tokens=QWEN_TOKENS,
            has_frames=True,
            has_taps=True,
        ),
        "glm4v": Tower(
            models={
                "glm4": Model(
                    model_type="glm4v",
                    model="Glm4vForConditionalGeneration",
                    text_type="glm4v_text",
                )
            },
            layers="model.visual.blocks",
            layer={**BLOCK, **GATED},
            outer=GLM_OUTER,
            last="mm.down.weight",
            tokens=GLM_TOKENS,
            has_frames=True,
        ),
        "gemma4v": Tower(
            models={
                "gemma4": Model(model_type="gemma4", model="Gemma4ForConditionalGeneration"),
            },
            layers=f"{GEMMA}.encoder.layers",
            layer={
                "ln1": "input_layernorm",
                "ln2": "pre_feedforward_layernorm",
                "attn_q_norm": "self_attn.q_norm",
                "attn_k_norm": "self_attn.k_norm",
                "attn_post_norm": "post_attention_layernorm",
                "ffn_post_norm": "post_feedforward_layernorm",
            },
            clipped={
                "attn_q": "self_attn.q_proj",
                "attn_k": "self_attn.k_proj",
                "attn_v": "self_attn.v_proj",
                "attn_out": "self_attn.o_proj",
                **GATED,
            },
            outer={
                "v.patch_embd": f"{GEMMA}.patch_embedder.input_proj",
                "mm.input_projection": "model.embed_vision.embedding_projection",
            },
            whole={
                "v.position_embd.weight": f"{GEMMA}.patch_embedder.position_embedding_table",
                "v.std_bias": f"{GEMMA}.std_bias",
                "v.std_scale": f"{GEMMA}.std_scale",
            },
            last="mm.input_projection.weight",
            tokens={
                "image_token_id": "<|image|>",
                "video_token_id": "<|video|>",
                "boi_token_id": "<|image>",
                "eoi_token_id": "<image|>",
            },
            has_rows=True,
            has_sounds=True,
        ),
        "lfm2": Tower(
            models={
                name: Model(model_type="lfm2_vl", model="Lfm2VlForConditionalGeneration")
                for name in ("lfm2", "lfm2moe")
            },
            layers=f"{SIGLIP}.encoder.layers",
            layer={
                "ln1": "layer_norm1",
                "ln2": "layer_norm2",
                "attn_q": "self_attn.q_proj",
                "attn_k": "self_attn.k_proj",
                "attn_v": "self_attn.v_proj",
                "attn_out": "self_attn.out_proj",
                "ffn_up": "mlp.fc1",
                "ffn_down": "mlp.fc2",
            },
            outer={
                "v.patch_embd": f"{SIGLIP}.embeddings.patch_embedding",
                "v.position_embd": f"{SIGLIP}.embeddings.position_embedding",
                "v.post_ln": f"{SIGLIP}.post_layernorm",
                "mm.input_norm": f"{PROJECTOR}.layer_norm",
                "mm.1": f"{PROJECTOR}.linear_1",
                "mm.2": f"{PROJECTOR}.linear_2",
            },
            last="mm.2.weight",
            tokens={"image_token_id": "<image>"},
            has_rows=True,
        ),
        "internvl": Tower(
            models={
                name: Model(model_type="internvl", model="InternVLForConditionalGeneration")
                for name in ("qwen2", "qwen3", "qwen3moe")
            },
            layers=f"{INTERN}.encoder.layer",
            layer={
                "ln1": "layernorm_before",
                "ln2": "layernorm_after",
                "attn_q": "attention.q_proj",
                "attn_k": "attention.k_proj",
                "attn_v": "attention.v_proj",
                "attn_q_norm": "attention.q_norm",
                "attn_k_norm": "attention.k_norm",
                "attn_out": "attention.projection_layer",
                "ffn_up": "mlp.fc1",
                "ffn_down": "mlp.fc2",
            },
            outer={
                "v.patch_embd": f"{INTERN}.embeddings.patch_embeddings.projection",
                "mm.model.mlp.0": f"{PROJECTOR}.layer_norm",
                "mm.model.mlp.1": f"{PROJECTOR}.linear_1",
                "mm.model.mlp.3": f"{PROJECTOR}.linear_2",
            },
            whole={
                "v.class_embd": f"{INTERN}.embeddings.cls_token",
                "v.position_embd.weight": f"{INTERN}.embeddings.position_embeddings",
                "ls1.weight": "lambda_1",
                "ls2.weight": "lambda_2",
            },
            last="mm.model.mlp.3.weight",
            tokens={"image_token_id": "<IMG_CONTEXT>"},
            new_axes={"v.class_embd": 3, "v.position_embd.weight": 3},
        ),
    }
)


def tower_of(header: Header) -> Tower:
    """Returns the tower of an mmproj file. Raises CheckpointError for a file that is none, and
    for a tower that is not known."""
    path = header.paths[0]
    if header.architecture != TOWER:
        raise CheckpointError(
            f"{path} is named as a vision tower, but its general.architecture is "
            f"{header.architecture[:60]!r}, not {TOWER!r}; rename it"
        )
    kind = header.values.get("clip.vision.projector_type", header.values.get("clip.projector_type"))
    if not isinstance(kind, str) or kind not in TOWERS:
        raise CheckpointError(
            f"the vision tower in {path} is of the kind {str(kind)[:60]!r}, which cannot be read; "
            f"known: {', '.join(TOWERS)}. Use the model's safetensors files, or move the file "
            "elsewhere to load the model without images"
        )
    return TOWERS[kind]


def model_of(text: Header, tower: Header) -> Model:
    """Returns what a text model and a vision tower are together. Raises CheckpointError when they
    do not belong together, and as `tower_of`."""
    models = tower_of(tower).models
    if text.architecture not in models:
        raise CheckpointError(
            f"the vision tower in {tower.paths[0]} belongs to a text model of the architecture "
            f"{' or '.join(models)}, but {text.paths[0].name} is of {text.architecture[:60]!r}; "
            "put each model and its mmproj file into a folder of their own"
        )
    return models[text.architecture]
