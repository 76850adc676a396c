"""Writes the folders beside this file: tiny models quantised by the libraries that own the formats.

    python tests/weights/owners/write.py gptqmodel autoawq autoround llmcompressor transformers

Each needs its library, which no test needs; all of them run on a CPU. `owner.json` in a folder
holds the version and, for each quantised weight, a hash of the values that the library itself
reads.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from mmdeploy_llm.testing.tiny import write_tiny

HERE = Path(__file__).parent
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
TIED = {**SIZES, "tie_word_embeddings": True}
KEPT_FILES = ("config.json", "model.safetensors", "quantize_config.json", "owner.json")


def hash_of(weight):
    """Returns a hash of the values of a weight, in which -0 is 0."""
    return hashlib.sha256((weight + 0).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def prompts():
    """Returns the token ids that libraries calibrate with."""
    random = torch.Generator().manual_seed(0)
    return torch.randint(8, 300, (16, 64), generator=random).tolist()


def finish(written, name, library, values):
    """Keeps what tests need of a folder. values: the dequantised weights, by key."""
    target = HERE / name
    shutil.rmtree(target, ignore_errors=True)
    owner = {
        "library": f"{library} {importlib.metadata.version(library)}",
        "dtype": str(next(iter(values.values())).dtype).removeprefix("torch."),
        "weights": {key: hash_of(weight) for key, weight in sorted(values.items())},
    }
    (written / "owner.json").write_text(json.dumps(owner, indent=1) + "\n")
    target.mkdir()
    for file in KEPT_FILES:
        if (written / file).exists():
            shutil.copy(written / file, target / file)


def gptqmodel(folder):
    """4 bits with zero points; gate and up in 8 bits and wider groups, down in floats."""
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
    from gptqmodel.nn_modules.qlinear import BaseQuantLinear

    plain = write_tiny("qwen2", folder / "plain", dtype=torch.bfloat16, **TIED)
    rules = {
        r"+:.*\.(gate|up)_proj": {"bits": 8, "group_size": 64},
        r"-:.*\.layers\.0\.mlp\.down_proj": {},
    }
    config = QuantizeConfig(bits=4, group_size=32, desc_act=False, sym=False, dynamic=rules)
    model = GPTQModel.load(str(plain), config, device="cpu")
    model.quantize([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in prompts()])
    model.save(str(folder / "written"))
    model = GPTQModel.load(
        str(folder / "written"), backend=BACKEND.TORCH, device="cpu", dtype=torch.float16
    )
    values = {
        f"{name}.weight": module.dequantize_weight().T
        for name, module in model.model.named_modules()
        if isinstance(module, BaseQuantLinear)
    }
    finish(folder / "written", "gptqmodel", "gptqmodel", values)


def autoawq(folder):
    """4 bits with zero points, found by the search for scales."""
    from awq import AutoAWQForCausalLM
    from awq.utils.packing_utils import dequantize_gemm

    rows = {"num_key_value_heads": 4, "intermediate_size": 128}  # it wants multiples of 64
    plain = write_tiny("qwen2", folder / "plain", dtype=torch.float16, **TIED, **rows)
    tokenizer = transformers.AutoTokenizer.from_pretrained(plain)
    model = AutoAWQForCausalLM.from_pretrained(
        str(plain), device_map="cpu", torch_dtype=torch.float16
    )
    config = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    texts = ["a red circle and a blue square on a green field " * 3] * 100
    model.quantize(tokenizer, quant_config=config, calib_data=texts, max_calib_seq_len=64)
    model.save_quantized(str(folder / "written"))
    stored = load_file(folder / "written" / "model.safetensors")
    values = {}
    for key in stored:
        if key.endswith(".qweight"):
            name = key.removesuffix(".qweight")
            parts = (stored[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales"))
            values[f"{name}.weight"] = dequantize_gemm(*parts, 4, 32).T
    finish(folder / "written", "autoawq", "autoawq", values)


def autoround(folder):
    """AutoRound's own format: 4 bits, q in 8 and down in floats."""
    from auto_round import AutoRound

    plain = write_tiny("qwen2", folder / "plain", dtype=torch.bfloat16, **TIED)
    tokenizer = transformers.AutoTokenizer.from_pretrained(plain)
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    layers = {
        "model.layers.0.mlp.down_proj": {"bits": 16},
        "model.layers.0.self_attn.q_proj": {"bits": 8},
    }
    rounding = {"scheme": "W4A16", "group_size": 32, "layer_config": layers}
    rounder = AutoRound(
        model, tokenizer, iters=0, disable_opt_rtn=True, device_map="cpu", **rounding
    )
    rounder.quantize_and_save(output_dir=str(folder / "out"), format="auto_round")
    written = next((folder / "out").rglob("config.json")).parent
    model = transformers.AutoModelForCausalLM.from_pretrained(
        written, dtype=torch.float16, device_map="cpu"
    )
    values = {}
    for name, module in model.named_modules():
        if hasattr(module, "qweight"):
            module.bias = None  # so that its answer to the unit vectors is its weight
            unit = torch.eye(module.infeatures, dtype=torch.float16)
            values[f"{name}.weight"] = module(unit).detach().T
    finish(written, "autoround", "auto-round", values)


def llmcompressor(folder):
    """Attention in FP8 by row, the MLP in 4 bits, keys and values with scales."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    plain = write_tiny("qwen2", folder / "plain", dtype=torch.bfloat16, **TIED)
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    float8 = {"num_bits": 8, "type": "float", "symmetric": True}
    rows = {
        "targets": ["re:.*self_attn.*"],
        "weights": {**float8, "strategy": "channel"},
        "input_activations": {**float8, "strategy": "token", "dynamic": True},
    }
    packed = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    groups = {
        "rows": rows,
        "groups": {"targets": ["re:.*mlp.*_proj$"], "weights": {**packed, "symmetric": False}},
    }
    cache = {**float8, "strategy": "tensor", "dynamic": False}
    recipe = QuantizationModifier(config_groups=groups, ignore=["lm_head"], kv_cache_scheme=cache)
    masks = [[1] * 64] * 16
    data = Dataset.from_dict({"input_ids": prompts(), "attention_mask": masks})
    tokenizer = transformers.AutoTokenizer.from_pretrained(plain)
    oneshot(model=model, recipe=recipe, processor=tokenizer, dataset=data, max_seq_length=64)
    model.save_pretrained(folder / "written", save_compressed=True)
    config = json.loads((folder / "written" / "config.json").read_text())["quantization_config"]
    stored = load_file(folder / "written" / "model.safetensors")
    values = {}
    for key in stored:
        if key.endswith(".weight_scale"):
            name = key.removesuffix(".weight_scale")
            is_attention = "self_attn" in name
            (group,) = (
                group
                for group in config["config_groups"].values()
                if ("self_attn" in group["targets"][0]) == is_attention
            )
            own = {k.removeprefix(f"{name}."): v for k, v in stored.items() if k.startswith(name)}
            compressor = BaseCompressor.get_value_from_registry(group["format"])
            scheme = QuantizationScheme.model_validate(group)
            values[f"{name}.weight"] = compressor.decompress(own, scheme)["weight"]
    finish(folder / "written", "llmcompressor", "llmcompressor", values)


def of_transformers(folder):
    """FP8 in blocks of 32 x 32, experts too."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    FineGrainedFP8HfQuantizer.validate_environment = lambda *args, **options: None  # wants a GPU
    sizes = {"head_dim": 16, "num_experts": 3, "moe_intermediate_size": 64}
    plain = write_tiny(
        "qwen3_moe", folder / "plain", dtype=torch.bfloat16, decoder_sparse_step=1, **TIED, **sizes
    )
    config = transformers.FineGrainedFP8Config(weight_block_size=(32, 32))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=config, dtype=torch.bfloat16, device_map="cpu"
    )
    model.save_pretrained(folder / "written")
    stored = load_file(folder / "written" / "model.safetensors")
    dequantize = Fp8Dequantize(None)._dequantize_one
    values = {}
    for name, module in model.named_modules():
        if hasattr(module, "weight_scale_inv"):
            scales = module.weight_scale_inv
            values[f"{name}.weight"] = dequantize(module.weight, scales, torch.float32)
        if hasattr(module, "gate_up_proj_scale_inv"):
            both = dequantize(module.gate_up_proj, module.gate_up_proj_scale_inv, torch.float32)
            down = dequantize(module.down_proj, module.down_proj_scale_inv, torch.float32)
            for expert in range(len(both)):
                gate, up = both[expert].chunk(2)
                values[f"{name}.{expert}.gate_proj.weight"] = gate
                values[f"{name}.{expert}.up_proj.weight"] = up
                values[f"{name}.{expert}.down_proj.weight"] = down[expert]
    assert values.keys() <= stored.keys()
    finish(folder / "written", "transformers", "transformers", values)


WRITERS = {
    "autoawq": autoawq,
    "autoround": autoround,
    "gptqmodel": gptqmodel,
    "llmcompressor": llmcompressor,
    "transformers": of_transformers,
}

if __name__ == "__main__":
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            WRITERS[name](Path(folder))
