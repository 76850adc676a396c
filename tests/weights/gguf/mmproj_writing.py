"""Writes the two GGUF files of a tiny image-text checkpoint, as llama.cpp's converter does (that of
gguf 0.19, conversion/*.py): the text model, and the vision tower in an mmproj file."""

from __future__ import annotations

import json

import gguf
import torch
from safetensors.torch import load_file

from .gguf_writing import add_tensor, write_gguf

PROJECTORS = {  # family of tiny checkpoints -> clip.projector_type
    "qwen2_vl": "qwen2vl_merger",
    "qwen2_5_vl": "qwen2.5vl_merger",
    "qwen3_vl": "qwen3vl_merger",
    "qwen3_vl_moe": "qwen3vl_merger",
    "qwen3_5": "qwen3vl_merger",
    "qwen3_5_moe": "qwen3vl_merger",
    "glm4v": "glm4v",
    "gemma4": "gemma4v",
    "lfm2_vl": "lfm2",
    "internvl": "internvl",
}
OF_TOWER = ("visual.", "vision_tower.", "multi_modal_projector.", "embed_vision.")
MIXED = ("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger", "glm4v")  # two frames in a patch
SPLIT = ("qwen2vl_merger", "qwen2.5vl_merger")
BOUNDS = (".input_max", ".input_min", ".output_max", ".output_min")
INTERN = {"layer_norm": "0", "linear_1": "1", "linear_2": "3"}
KINDS = (".weight", ".bias", *BOUNDS)


def write_pair(folder, place, family, *, kind="F32", tower_kind=None, extra=None):
    """Writes model.gguf and mmproj-model.gguf of the checkpoint in `folder` to the folder `place`.

    extra: called with the writer of the second file, to change the metadata.
    """
    place.mkdir(exist_ok=True)
    write_gguf(folder, place / "model.gguf", family, kind=kind)
    return write_tower(
        folder, place / "mmproj-model.gguf", family, kind=tower_kind or kind, extra=extra
    )


def write_tower(folder, path, family, *, kind="F32", extra=None):
    config = json.loads((folder / "config.json").read_text())
    projector = PROJECTORS[family]
    writer = gguf.GGUFWriter(path, "clip")
    add_metadata(writer, projector, config, preprocessor(folder))
    if extra is not None:
        extra(writer)
    for name, tensor in tower_tensors(
        load_file(folder / "model.safetensors"), projector, config["vision_config"]
    ):
        is_small = "position" in name or "patch_embd" in name or "patch_merger" in name
        add_tensor(writer, name, tensor, "F32" if is_small or tensor.shape[-1] % 32 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def preprocessor(folder):
    clip = {
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    return {**clip, **json.loads((folder / "preprocessor_config.json").read_text())}


def add_metadata(writer, projector, config, images):
    vision = config["vision_config"]
    writer.add_type("mmproj")
    writer.add_clip_has_vision_encoder(True)
    writer.add_vision_projection_dim(config["text_config"]["hidden_size"])
    writer.add_vision_image_size(image_size(vision))
    writer.add_vision_patch_size(one(vision["patch_size"]))
    writer.add_vision_embedding_length(vision.get("embed_dim", vision["hidden_size"]))
    inner = vision["hidden_size"] if "embed_dim" in vision else vision["intermediate_size"]
    writer.add_vision_feed_forward_length(inner)
    writer.add_vision_block_count(vision.get("depth") or vision["num_hidden_layers"])
    writer.add_vision_head_count(vision.get("num_heads") or vision["num_attention_heads"])
    writer.add_vision_image_mean(images["image_mean"])
    writer.add_vision_image_std(images["image_std"])
    if projector == "gemma4v":
        writer.add_clip_vision_projector_type(projector)
    else:
        writer.add_clip_projector_type(projector)
    eps = vision.get("layer_norm_eps") or vision.get("rms_norm_eps") or 1e-6
    writer.add_vision_attention_layernorm_eps(eps)
    if projector in ("qwen2.5vl_merger", "glm4v"):
        writer.add_vision_use_silu(True)
    elif projector in ("qwen3vl_merger", "lfm2", "internvl"):
        writer.add_vision_use_gelu(True)
    if projector == "qwen2.5vl_merger":
        writer.add_vision_n_wa_pattern(vision["fullatt_block_indexes"][0] + 1)
    if projector == "qwen3vl_merger":
        writer.add_vision_spatial_merge_size(vision["spatial_merge_size"])
        taps = vision.get("deepstack_visual_indexes", [])
        writer.add_vision_is_deepstack_layers([i in taps for i in range(vision["depth"])])
    if projector == "lfm2":
        writer.add_vision_projector_scale_factor(config["downsample_factor"])
    if projector == "internvl":
        writer.add_vision_projector_scale_factor(int(1 / config["downsample_ratio"]))


def one(value):
    return value[0] if isinstance(value, list) else value


def image_size(vision):
    if "num_position_embeddings" in vision:
        return int(vision["num_position_embeddings"] ** 0.5) * vision["patch_size"]
    return one(vision.get("image_size", 560))


def tower_tensors(tensors, projector, vision):
    """Yields the tensors under their names in GGUF, changed as the converter changes them."""
    # Numbers of the projector's layers are looked up as if they were layers of the tower.
    depth = max(4, vision.get("depth") or vision["num_hidden_layers"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, depth)
    for key, tensor in tensors.items():
        key = key.removeprefix("model.")
        if not key.startswith(OF_TOWER):
            continue
        for own, values in changed(key, tensor, projector, vision):
            if own.startswith(("v.", "mm.")):
                yield own, values
                continue
            name = names.get_name(own, try_suffixes=KINDS)
            assert name is not None, own
            yield name, values


def changed(key, tensor, projector, vision):
    if projector in MIXED and key == "visual.patch_embed.proj.weight":
        yield "v.patch_embd.weight", tensor[:, :, 0]
        yield "v.patch_embd.weight.1", tensor[:, :, 1]
    elif projector in SPLIT and ".qkv." in key:
        for letter, part in zip("qkv", tensor.chunk(3), strict=True):
            yield key.replace("qkv", letter), part
    elif projector == "qwen3vl_merger":
        yield merger_name(key, vision), tensor
    elif projector == "lfm2":
        if "vision_model" not in key:  # as in the published files
            key = key.replace("vision_tower.", "vision_tower.vision_model.")
        yield key, channels_first(tensor) if "patch_embedding.weight" in key else tensor
    elif projector == "internvl":
        kind, _, rest = key.removeprefix("multi_modal_projector.").partition(".")
        key = f"mlp1.{INTERN[kind]}.{rest}" if kind in INTERN else f"model.{key}"
        yield (f"{key}.weight" if ".lambda_" in key or "position_emb" in key else key), tensor
    elif projector == "gemma4v":
        yield from gemma4(f"model.{key}", tensor)
    elif key == "visual.patch_embed.proj.bias":
        yield "v.patch_embd.bias", tensor
    else:
        yield key, tensor


def merger_name(key, vision):
    if key.startswith("visual.deepstack_merger_list."):
        number, rest = key.split(".", maxsplit=3)[2:]
        layer = vision["deepstack_visual_indexes"][int(number)]
        return f"v.deepstack.{layer}.{rest.replace('linear_fc', 'fc')}"
    outer = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}
    if key.startswith("visual.merger."):
        kind, suffix = key.split(".")[2:]
        return f"{outer[kind]}.{suffix}"
    return "v.patch_embd.bias" if key == "visual.patch_embed.proj.bias" else key


def gemma4(key, tensor):
    key = key.replace("model.vision_tower.encoder.", "vision_model.model.")
    key = key.replace(".linear.weight", ".weight")
    if key.endswith("position_embedding_table"):
        key += ".weight"
    if key.endswith("patch_embedder.input_proj.weight"):
        tensor = channels_first(tensor)
    yield key, tensor.reshape(1) if tensor.ndim == 0 else tensor


def channels_first(tensor):
    side = int((tensor.shape[1] // 3) ** 0.5)
    return tensor.reshape(tensor.shape[0], side, side, 3).permute(0, 3, 1, 2)


def write_qwen25_vl(folder):
    """Writes a tiny checkpoint of Qwen2.5-VL, from that of Qwen2-VL."""
    import transformers

    from mmdeploy_llm.testing.tiny import randomize, write_tiny

    write_tiny("qwen2_vl", folder)
    given = json.loads((folder / "config.json").read_text())
    vision = {
        "depth": 4,
        "hidden_size": 48,
        "num_heads": 4,
        "intermediate_size": 80,
        "out_hidden_size": given["text_config"]["hidden_size"],
        "fullatt_block_indexes": [1, 3],
        "tokens_per_second": 2,
    }
    text = {name: value for name, value in given["text_config"].items() if name != "model_type"}
    others = ("architectures", "model_type", "text_config", "vision_config", "transformers_version")
    rest = {name: value for name, value in given.items() if name not in others}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **rest)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
        randomize(model)
    model.save_pretrained(folder)
    return folder
