"""Writes GGUF files of the tiny checkpoints with the format's own library, as llama.cpp's converter
does: its names, its metadata and its changes of the weights."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

ARCHITECTURES = {  # family of tiny checkpoints -> general.architecture
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "granite": "granite",
    "lfm2": "lfm2",
    "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5-moe",
    "glm4": "glm4",
    "phi3": "phi3",
    "gemma4_text": "gemma4",
    "qwen3_next": "qwen3next",
    "lfm2_moe": "lfm2moe",
    "granite_hybrid": "granitehybrid",
}
WITH_TOWER = {  # whose text models are written
    "qwen2_vl": "qwen2vl",
    "qwen2_5_vl": "qwen2vl",
    "qwen3_vl": "qwen3vl",
    "qwen3_vl_moe": "qwen3vlmoe",
    "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe",
    "glm4v": "glm4",
    "gemma4": "gemma4",
    "lfm2_vl": "lfm2",
    "internvl": "qwen3",
}
PERMUTED = ("llama", "granite", "granitehybrid")
# Whose configs, and so whose files, state no channels of a head.
WITHOUT_SIZE = ("granite", "granitehybrid", "phi3", "gemma4", "qwen2vl", "glm4", "lfm2", "lfm2moe")
WITHOUT_SIZE += ("starcoder2", "olmo2", "command-r", "exaone4", "phi2")
# Whose files state the rotated channels.
WITH_ROTARY = (*PERMUTED, "glm4", "phi2", "phi3", "qwen35", "qwen35moe", "qwen3next")
ADDS_ONE = ("gemma", "gemma2", "gemma3")
QUERY = re.compile(r"\.[qk]_proj\.")
EXPERT = re.compile(r"(model\.layers\.\d+\.(?:mlp|feed_forward)\.experts)\.(\d+)\.(\w+)\.weight")


def write_gguf(
    folder, path, family="", *, arch="", kind="F32", num_files=1, tokenizer=True, extra=None
):
    """Writes the checkpoint in `folder` to `path`.

    arch: general.architecture, by default that of the family. kind: type of the matrices.
    num_files: path becomes NAME-00001-of-0000N.gguf and so on.
    extra: called with the writer, to change the metadata.
    """
    arch = arch or {**ARCHITECTURES, **WITH_TOWER}[family]
    config = json.loads((folder / "config.json").read_text())
    # The converter computes in float32.
    tensors = {key: each.float() for key, each in load_file(folder / "model.safetensors").items()}
    if family in WITH_TOWER:
        tensors = text_tensors(tensors)
        is_tied = "lm_head.weight" not in tensors
        config = {**config["text_config"], "tie_word_embeddings": is_tied}
    options = {}
    if num_files > 1:
        options = {"split_max_tensors": 8}
    writer = gguf.GGUFWriter(path, arch, **options)
    add_metadata(writer, arch, config)
    if tokenizer:
        add_tokenizer(writer, folder)
    if extra is not None:
        extra(writer)
    for name, tensor in converted(tensors, arch, config):
        add_tensor(writer, name, tensor, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


OF_TOWERS = ("visual.", "vision_tower.", "multi_modal_projector.", "embed_vision.")
OF_TOWERS += ("audio_tower.", "embed_audio.")  # the sounds of Gemma 4 are not written


def text_tensors(tensors):
    """Returns the text model of an image-text model, under the names that it has alone."""
    found = {}
    for key, tensor in tensors.items():
        own = key.removeprefix("model.")
        if own.startswith(OF_TOWERS):
            continue
        own = own.removeprefix("language_model.").removeprefix("model.")
        own = own if own.startswith("lm_head.") else f"model.{own}"
        if own.endswith(".experts.gate_up_proj"):
            parts = zip(("gate_proj", "up_proj"), tensor.chunk(2, 1), strict=True)
            found |= {f"{own.replace('gate_up_proj', name)}.weight": part for name, part in parts}
        else:
            found[f"{own}.weight" if own.endswith(".experts.down_proj") else own] = tensor
    return found


def converted(tensors, arch, config):
    """Yields the tensors under their names in GGUF, changed as the converter changes them."""
    number = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    found = stacked(tensors)
    if arch == "qwen3next":
        found = separate_qkv(found, config)
    if arch == "granitehybrid":
        found = separate_gates(found, config)
    for key, tensor in found.items():
        if arch == "qwen3next":
            key, tensor = next_changes(key, tensor)
        elif arch.startswith("qwen35"):
            key, tensor = hybrid(key, tensor, config)
        if arch == "gemma4":
            key = gemma4_key(key)
        if arch == "granitehybrid":
            tensor = mamba(key, tensor, config)
        key = key.replace(".expert_bias", ".expert_bias.bias")
        key = key.replace("e_score_correction_bias", "e_score_correction.bias")
        if key == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        name = key if key.startswith("blk.") else name_of(names, key)
        if arch in PERMUTED and "q_proj" in key:
            tensor = permuted(tensor, heads[0])
        elif arch in PERMUTED and "k_proj" in key:
            tensor = permuted(tensor, heads[1])
        elif arch in ADDS_ONE and key.endswith("norm.weight"):
            tensor = tensor + 1
        elif arch == "glm4" and "mrope_section" in config["rope_parameters"] and QUERY.search(key):
            tensor = halves(tensor, config)
        elif arch in ("lfm2", "lfm2moe") and key.endswith("conv.conv.weight"):
            tensor = tensor.squeeze(1)
        yield name, tensor
    rope = config["rope_parameters"]
    if arch == "gemma4":
        yield "rope_freqs.weight", proportional_factors(config)
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", llama3_factors(config)
    if rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", torch.tensor(rope["long_factor"])
        yield "rope_factors_short.weight", torch.tensor(rope["short_factor"])


def name_of(names, key):
    """Returns the library's name; some of its tables leave "model." out."""
    keys = (key, key.removeprefix("model."))
    found = [names.get_name(each, try_suffixes=(".weight", ".bias")) for each in keys]
    assert any(found), key
    return found[0] or found[1]


def stacked(tensors):
    """Stacks the experts of each layer."""
    found, experts = {}, defaultdict(dict)
    for key, tensor in tensors.items():
        match = EXPERT.fullmatch(key)
        if match is None:
            found[key] = tensor
        else:
            experts[f"{match[1]}.{match[3]}.weight"][int(match[2])] = tensor
    for key, own in experts.items():
        found[key] = torch.stack([own[index] for index in sorted(own)])
    return found


def separate_qkv(tensors, config):
    """Takes in_proj_qkvz apart, whose rows lie key head by key head."""
    num, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] // num * config["linear_value_head_dim"]
    found = {}
    for key, tensor in tensors.items():
        if "in_proj_qkvz" not in key:
            found[key] = tensor
            continue
        heads = tensor.reshape(num, -1, tensor.shape[1]).split([size, size, value, value], 1)
        q, k, v, z = (part.reshape(-1, tensor.shape[1]) for part in heads)
        found[key.replace("in_proj_qkvz", "in_proj_qkv")] = torch.cat([q, k, v])
        found[key.replace("in_proj_qkvz", "in_proj_z")] = z
    return found


def next_changes(key, tensor):
    """Changes a tensor of Qwen3-Next."""
    if key.endswith("A_log"):
        tensor = -torch.exp(tensor)
    elif "conv1d" in key:
        tensor = tensor.squeeze()
    elif key.endswith("norm.weight") and not key.endswith("linear_attn.norm.weight"):
        tensor = tensor + 1
    return key.replace(".dt_bias", ".dt_proj.bias"), tensor


def separate_gates(tensors, config):
    """Takes the fused matrices of Granite's MLPs apart."""
    found = {}
    shared = "_shexp" if config["num_local_experts"] else ""
    for key, tensor in tensors.items():
        if key.endswith("shared_mlp.output_linear.weight"):
            found[f"blk.{key.split('.')[2]}.ffn_down{shared}.weight"] = tensor
            continue
        if "input_linear" not in key:
            found[key.replace(".dt_bias", ".dt_proj.bias")] = tensor
            continue
        layer = key.split(".")[2]
        for name, part in zip(("gate", "up"), tensor.chunk(2, -2), strict=True):
            leaf = f"ffn_{name}{shared if 'shared_mlp' in key else '_exps'}"
            found[f"blk.{layer}.{leaf}.weight"] = part
    return found


def mamba(key, tensor, config):
    """Changes a tensor of a layer of Mamba-2."""
    if key.endswith("A_log"):
        return -torch.exp(tensor.reshape(-1, 1))
    if key.endswith("mamba.D"):
        return tensor.reshape(-1, 1)
    if key.endswith("mamba.norm.weight"):
        return tensor.reshape(config["mamba_n_groups"], -1)
    return tensor.squeeze() if key.endswith("conv1d.weight") else tensor


def hybrid(key, tensor, config):
    """Changes a tensor of Qwen3.5, whose value heads become tiles."""
    if "linear_attn" in key and "linear_attn.norm" not in key:
        tensor = tiled(key.split("linear_attn.")[1], tensor, config)
    elif key.endswith("norm.weight") and "linear_attn.norm" not in key:
        tensor = tensor + 1
    if key.endswith("A_log"):
        tensor = -torch.exp(tensor)
    return key.replace(".dt_bias", ".dt_proj.bias"), tensor


def tiled(name, tensor, config):
    num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size = config["linear_value_head_dim"]
    if name == "out_proj.weight":
        return tiled("in_proj_z.weight", tensor.T, config).T.contiguous()
    start = 0
    if name in ("in_proj_qkv.weight", "conv1d.weight"):
        start = 2 * num_keys * config["linear_key_head_dim"]
    elif name != "in_proj_z.weight":
        size = 1
    if name == "conv1d.weight":
        tensor = tensor.squeeze(1)
    values = tensor[start:].reshape(num_keys, num_values // num_keys, size, *tensor.shape[1:])
    values = values.swapaxes(0, 1).reshape(tensor[start:].shape)
    return torch.cat([tensor[:start], values])


def permuted(tensor, num_heads):
    halves = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def halves(tensor, config):
    """Sorts the rotated rows of each head, from pairs to halves."""
    size = config["hidden_size"] // config["num_attention_heads"]
    rotated = int(size * config["rope_parameters"]["partial_rotary_factor"])
    heads = tensor.reshape(-1, size, *tensor.shape[1:])
    parts = [heads[:, :rotated:2], heads[:, 1:rotated:2], heads[:, rotated:]]
    return torch.cat(parts, 1).reshape(tensor.shape)


def gemma4_key(key):
    if key.endswith("layer_scalar") or ".experts." in key:
        return f"{key}.weight"
    special = {
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
    }
    for own, name in special.items():
        if key.endswith(own):
            return f"blk.{key.split('.')[2]}.{name}"
    return key


def proportional_factors(config):
    half = gemma4_global(config, "head_dim") // 2
    share = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    return torch.tensor([1.0 if i < int(half * share) else 1e30 for i in range(half)])


def gemma4_global(config, name):
    """Returns a size of layers without a window, which newer versions of transformers keep by
    layer; None where all layers share it."""
    own = next(iter((config.get("per_layer_config") or {}).values()), {})
    return own.get(
        name, config.get(f"num_global_{name[4:]}" if "num_" in name else f"global_{name}")
    )


def llama3_factors(config):
    """Divides the plain frequencies by those that transformers computes."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    size, theta = config["head_dim"], config["rope_parameters"]["rope_theta"]
    plain = theta ** -(torch.arange(0, size, 2, dtype=torch.float32) / size)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config), device="cpu")
    return plain / scaled


def add_tensor(writer, name, tensor, kind):
    """Quantises matrices; small tensors stay in float32."""
    values = tensor.float().contiguous().numpy()
    is_small = values.ndim == 1 or "ffn_gate_inp" in name or "conv" in name
    number = gguf.GGMLQuantizationType["F32" if is_small else kind]
    data = gguf.quantize(values, number)
    if number in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
        writer.add_tensor(name, data)
    else:
        writer.add_tensor(name, data, raw_dtype=number)


def add_metadata(writer, arch, config):
    rope = config["rope_parameters"]
    shared = rope.get("full_attention", rope)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_name("tiny")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    if "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    eps = config.get("rms_norm_eps") or config.get("norm_eps")
    if eps is None:
        writer.add_layer_norm_eps(config.get("norm_epsilon") or config["layer_norm_eps"])
    else:
        writer.add_layer_norm_rms_eps(eps)
    writer.add_rope_freq_base(shared["rope_theta"])
    if "mrope_section" in shared and not arch.startswith("qwen35"):
        writer.add_rope_dimension_sections([*shared["mrope_section"], 0])
    if arch not in WITHOUT_SIZE:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if arch in WITH_ROTARY:
        writer.add_rope_dimension_count(int(head_dim * shared.get("partial_rotary_factor", 1.0)))
    if shared.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(shared["rope_type"]))
        writer.add_rope_scaling_factor(shared["factor"])
    if shared.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(shared["original_max_position_embeddings"])
    OWN.get(arch, lambda writer, config: None)(writer, config)


def _moe(writer, config):
    writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _qwen35(writer, config):
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(values)
    writer.add_full_attention_interval(4)
    if "mrope_section" in config["rope_parameters"]:
        writer.add_rope_dimension_sections([*config["rope_parameters"]["mrope_section"], 0])


def _qwen35moe(writer, config):
    _qwen35(writer, config)
    _moe(writer, config)


def _ernie_moe(writer, config):
    writer.add_expert_count(config["moe_num_experts"])
    writer.add_expert_used_count(config["moe_k"])
    writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    writer.add_leading_dense_block_count(config["moe_layer_start_index"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["moe_num_shared_experts"])


def _gemma2(writer, config):
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])


def _gemma3(writer, config):
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])


def _gemma4(writer, config):
    kinds = config["layer_types"]
    is_local = [kind == "sliding_attention" for kind in kinds]
    size = gemma4_global(config, "head_dim")
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"] or 0)
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(is_local)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    writer.add_rope_dimension_count(size)
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    heads = gemma4_global(config, "num_key_value_heads")
    if heads is not None:
        own = config["num_key_value_heads"]
        del writer.kv_data[0]["gemma4.attention.head_count_kv"]
        writer.add_head_count_kv([own if local else heads for local in is_local])
    first = len(kinds) - config["num_kv_shared_layers"]
    if config["use_double_wide_mlp"]:
        sizes = [config["intermediate_size"] * (1 if i < first else 2) for i in range(len(kinds))]
        del writer.kv_data[0]["gemma4.feed_forward_length"]
        writer.add_feed_forward_length(sizes)
    if config.get("enable_moe_block"):
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _granite(writer, config):
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def _lfm2(writer, config):
    kinds = config["layer_types"]
    heads = config["num_key_value_heads"]
    del writer.kv_data[0]["lfm2.attention.head_count_kv"]
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in kinds])
    del writer.kv_data[0]["lfm2.feed_forward_length"]
    writer.add_feed_forward_length(lfm2_size(config))
    writer.add_shortconv_l_cache(config["conv_L_cache"])


def _lfm2moe(writer, config):
    kinds = config["layer_types"]
    heads = config["num_key_value_heads"]
    del writer.kv_data[0]["lfm2moe.attention.head_count_kv"]
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in kinds])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    writer.add_leading_dense_block_count(config["num_dense_layers"])
    _moe(writer, config)


def _granite_hybrid(writer, config):
    _granite(writer, config)
    kinds, heads = config["layer_types"], config["num_key_value_heads"]
    del writer.kv_data[0]["granitehybrid.attention.head_count_kv"]
    is_mamba = ("linear_attention", "mamba")
    writer.add_head_count_kv([0 if kind in is_mamba else heads for kind in kinds])
    del writer.kv_data[0]["granitehybrid.context_length"]
    writer.add_context_length(2**20)  # whatever the model's is: no positions are rotated
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(config["mamba_n_heads"] * config["mamba_d_head"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    writer.add_rope_scaling_finetuned(False)


def lfm2_size(config):
    """The converter writes the size that block_auto_adjust_ff_dim makes."""
    size = config["intermediate_size"]
    if not config["block_auto_adjust_ff_dim"]:
        return size
    size = int(2 * size / 3)
    if config["block_ffn_dim_multiplier"] is None:
        return size
    multiple = config["block_multiple_of"]
    return multiple * math.ceil(int(config["block_ffn_dim_multiplier"] * size) / multiple)


def _cohere(writer, config):
    writer.add_logit_scale(config["logit_scale"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def _windows(writer, config):
    if config.get("sliding_window") is not None:
        writer.add_sliding_window(config["sliding_window"])
        kinds = config["layer_types"]
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])


def _phi3(writer, config):
    writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    writer.add_sliding_window(config["sliding_window"] or 0)


OWN = {
    "qwen2moe": _moe,
    "qwen3moe": _moe,
    "qwen3vlmoe": _moe,
    "ernie4_5-moe": _ernie_moe,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "granite": _granite,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2moe,
    "qwen3next": _qwen35moe,
    "granitehybrid": _granite_hybrid,
    "phi3": _phi3,
    "command-r": _cohere,
    "exaone4": _windows,
    "olmo2": _windows,
}


def add_tokenizer(writer, folder):
    """Adds the byte-level vocabulary of a tiny checkpoint, its merges and its chat template."""
    spec = json.loads((folder / "tokenizer.json").read_text())
    options = json.loads((folder / "tokenizer_config.json").read_text())
    ids = dict(spec["model"]["vocab"])
    kinds = [gguf.TokenType.NORMAL] * len(ids)
    for token in spec["added_tokens"]:
        ids[token["content"]] = token["id"]
        is_special = token["special"]
        kinds[token["id"]] = gguf.TokenType.CONTROL if is_special else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(sorted(ids, key=ids.get))
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in spec["model"]["merges"]])
    writer.add_bos_token_id(ids[options["bos_token"]])
    writer.add_eos_token_id(ids[options["eos_token"]])
    writer.add_pad_token_id(ids[options["pad_token"]])
    writer.add_unk_token_id(ids[options["unk_token"]])
    writer.add_add_bos_token(False)
    writer.add_chat_template((folder / "chat_template.jinja").read_text())


def random_blocks(kind, num_rows, num_blocks, seed=0):
    """Returns rows of random blocks of a type, with scales that are finite."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    del block_size
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (num_rows, num_blocks, block_bytes), dtype=np.uint8)
    return data.reshape(num_rows, num_blocks * block_bytes)
