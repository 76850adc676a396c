"""A quantised folder generates the tokens of transformers with the dequantised weights."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.testing import write_checkpoint
from mmdeploy_llm.testing.tiny import make_tokenizer, write_tiny

from .packing import awq_tensors, gptq_tensors, grouped, random_codes

SIZE = 16  # columns of a group
PROMPTS = ([5, 9, 200, 31, 7], [40, 41, 42])
SIZES = {"hidden_size": 64, "num_attention_heads": 4}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def awq(name, shape, random):
    codes, zeros, scales = random_codes(*shape, SIZE, random)
    weight = grouped(codes, zeros, scales, torch.arange(shape[1]) // SIZE)
    return awq_tensors(name, codes, zeros, scales), weight


def gptq(name, shape, random):
    codes, zeros, scales = random_codes(*shape, SIZE, random)
    group_of = (torch.arange(shape[1]) // SIZE)[torch.randperm(shape[1], generator=random)]
    weight = grouped(codes, zeros, scales, group_of)
    return gptq_tensors(name, codes, zeros, scales, group_of), weight


def fp8(name, shape, random):
    codes = (torch.randn(shape, generator=random) / shape[1] ** 0.5).to(torch.float8_e4m3fn)
    n, k = (-(-size // 32) for size in shape)
    scales = torch.rand(n, k, generator=random) + 0.5
    spread = scales.repeat_interleave(32, 0).repeat_interleave(32, 1)[: shape[0], : shape[1]]
    weight = codes.float() * spread
    return {f"{name}.weight": codes, f"{name}.weight_scale_inv": scales}, weight


def int8(name, shape, random):
    codes = torch.randint(-127, 128, shape, generator=random).to(torch.int8)
    scales = torch.rand(shape[0], 1, generator=random) / (64 * shape[1] ** 0.5)
    return {f"{name}.weight": codes, f"{name}.weight_scale": scales}, codes * scales


METHODS = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": SIZE, "version": "gemm"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": SIZE, "desc_act": True}),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [32, 32]}),
    "w8a8": (
        int8,
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
                }
            },
            "ignore": ["lm_head"],
        },
    ),
}


def quantised_pair(folder, method, plain):
    """Writes two copies of the checkpoint `plain`: one whose decoder layers are quantised, one with
    the same weights dequantised."""
    make, settings = METHODS[method]
    random = torch.Generator().manual_seed(0)
    tensors = load_file(plain / "model.safetensors")
    quantised, dequantised = {}, {}
    for key, tensor in tensors.items():
        is_linear = "_proj.weight" in key and tensor.dim() == 2 and "visual" not in key
        if not is_linear:
            quantised[key] = dequantised[key] = tensor
            continue
        stored, weight = make(key.removesuffix(".weight"), tuple(tensor.shape), random)
        quantised.update(stored)
        dequantised[key] = weight.float()
    folders = folder / "quantised", folder / "dequantised"
    for target, values in zip(folders, (quantised, dequantised), strict=True):
        shutil.copytree(plain, target)
        save_file(
            {key: value.contiguous() for key, value in values.items()},
            target / "model.safetensors",
            metadata={"format": "pt"},
        )
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = settings
    (folders[0] / "config.json").write_text(json.dumps(config))
    return folders


def tokens_of(folder, **options):
    with LLM(str(folder), dtype="float32", block_size=16, **options) as llm:
        return [out.outputs.token_ids for out in llm.generate(list(PROMPTS), PARAMS)]


@torch.inference_mode()
def reference_tokens(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(PARAMS.max_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        found.append(ids[len(prompt) :])
    return found


@pytest.mark.parametrize("method", METHODS)
def test_tokens(tmp_path, method):
    plain = write_tiny("qwen2", tmp_path / "plain", **SIZES)
    quantised, dequantised = quantised_pair(tmp_path, method, plain)
    assert tokens_of(quantised) == reference_tokens(dequantised)


def test_experts(tmp_path):
    plain = write_tiny("qwen3_moe", tmp_path / "plain", head_dim=16, moe_intermediate_size=32)
    quantised, dequantised = quantised_pair(tmp_path, "awq", plain)
    assert tokens_of(quantised) == reference_tokens(dequantised)


def test_a_model_of_transformers(tmp_path):
    tokenizer = make_tokenizer()
    config = transformers.StableLmConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    plain = write_checkpoint(config, tmp_path / "plain", tokenizer=tokenizer)
    quantised, dequantised = quantised_pair(tmp_path, "gptq", plain)
    assert tokens_of(quantised) == reference_tokens(dequantised)


def test_two_ranks(tmp_path):
    plain = write_tiny("qwen2", tmp_path / "plain", **SIZES)
    quantised, dequantised = quantised_pair(tmp_path, "gptq", plain)
    assert tokens_of(quantised, tensor_parallel_size=2) == reference_tokens(dequantised)
