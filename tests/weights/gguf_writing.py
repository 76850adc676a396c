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
}
PERMUTED = ("llama", "granite")
ADDS_ONE = ("gemma", "gemma2", "gemma3")
EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(\w+)\.weight")


def write_gguf(folder, path, family, *, kind="F32", num_files=1, tokenizer=True, extra=None):
    """Writes the checkpoint in `folder` to `path`.

    kind: type of the matrices. num_files: path becomes NAME-00001-of-0000N.gguf and so on.
    extra: called with the writer, to change the metadata.
    """
    arch = ARCHITECTURES[family]
    config = json.loads((folder / "config.json").read_text())
    options = {}
    if num_files > 1:
        options = {"split_max_tensors": 8}
    writer = gguf.GGUFWriter(path, arch, **options)
    add_metadata(writer, arch, config)
    if tokenizer:
        add_tokenizer(writer, folder)
    if extra is not None:
        extra(writer)
    for name, tensor in converted(load_file(folder / "model.safetensors"), arch, config):
        add_tensor(writer, name, tensor, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(tensors, arch, config):
    """Yields the tensors under their names in GGUF, changed as the converter changes them."""
    number = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    for key, tensor in stacked(tensors).items():
        if arch.startswith("qwen35"):
            key, tensor = hybrid(key, tensor, config)
        key = key.replace("e_score_correction_bias", "e_score_correction.bias")
        if key == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert name is not None, key
        if arch in PERMUTED and "q_proj" in key:
            tensor = permuted(tensor, heads[0])
        elif arch in PERMUTED and "k_proj" in key:
            tensor = permuted(tensor, heads[1])
        elif arch in ADDS_ONE and key.endswith("norm.weight"):
            tensor = tensor + 1
        elif arch == "lfm2" and key.endswith("conv.conv.weight"):
            tensor = tensor.squeeze(1)
        yield name, tensor
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", llama3_factors(config)
    if rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", torch.tensor(rope["long_factor"])
        yield "rope_factors_short.weight", torch.tensor(rope["short_factor"])


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
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["norm_eps"])
    writer.add_rope_freq_base(shared["rope_theta"])
    if arch not in ("granite", "phi3"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if arch in ("llama", "granite", "glm4", "phi3", "qwen35", "qwen35moe"):
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


def _phi3(writer, config):
    writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    writer.add_sliding_window(config["sliding_window"] or 0)


OWN = {
    "qwen2moe": _moe,
    "qwen3moe": _moe,
    "ernie4_5-moe": _ernie_moe,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "granite": _granite,
    "lfm2": _lfm2,
    "phi3": _phi3,
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
