"""Stacks of experts are rounded matrix by matrix, whatever the order of their axes, and written
under the names of single experts."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.checkpoints.quantize import quantize_checkpoint
from mmdeploy_llm.checkpoints.saving.rounding import Scheme, round_groups
from mmdeploy_llm.testing.tiny import write_tiny

from .test_quantize import dequantised, tokens_of

SIZES = {"moe_intermediate_size": 128}  # stacks of no square matrices: their axes can be told apart
GEMMA = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
    "hidden_size_per_layer_input": 16,
}
FAMILIES = {"qwen3_vl_moe": SIZES, "gemma4_text": GEMMA}


def stacks(folder):
    """Returns the stored stacks of a checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    return {
        key: tensor for key, tensor in tensors.items() if tensor.dim() == 3 and "experts" in key
    }


def swap(folder):
    """Stores stacks as Qwen3-VL-MoE is published, with their last two axes swapped."""
    tensors = load_file(folder / "model.safetensors")
    swapped = {key: stack.mT.contiguous() for key, stack in stacks(folder).items()}
    save_file(tensors | swapped, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.full
@pytest.mark.one_is_quick
@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.full)])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens(tmp_path, caplog, family, bits):
    """The model of few bits gives the tokens of the weights that compressed-tensors decompresses,
    and its experts stay in few bits."""
    plain, output = write_tiny(family, tmp_path / "plain", **FAMILIES[family]), tmp_path / "out"
    assert stacks(plain)
    done = quantize_checkpoint(str(plain), output, bits=bits, group_size=32).summary
    assert not done.stacked
    other, values = dequantised(output, bits, plain)
    for key, stack in stacks(plain).items():
        rows = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
        stem, _, name = key.rpartition(".")
        for index, matrix in enumerate(stack):
            parts = [values[f"{stem}.{index}.{part}.weight"] for part in rows[name]]
            error = (torch.cat(parts) - matrix).norm() / matrix.norm()
            assert 0 < error < {4: 0.15, 8: 0.01}[bits]
    with caplog.at_level("INFO", logger="mmdeploy_llm"):
        assert tokens_of(output) == tokens_of(other)
    assert "weights stay in few bits" in caplog.text
    assert "are dequantised" not in caplog.text


@pytest.mark.full
def test_swapped_axes(tmp_path):
    plain = write_tiny("qwen3_vl_moe", tmp_path / "plain", **SIZES)
    swapped = write_tiny("qwen3_vl_moe", tmp_path / "swapped", **SIZES)
    swap(swapped)
    found = []
    for folder in (plain, swapped):
        output = folder.with_name(f"{folder.name}-out")
        quantize_checkpoint(str(folder), output, bits=4, group_size=32)
        found.append(load_file(output / "model-00001.safetensors"))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(tensor, found[1][key]) for key, tensor in found[0].items())


def test_no_group_fits(tmp_path):
    """Stacks whose rows the groups do not divide are copied, and said to be."""
    sizes = {"moe_intermediate_size": 24, "hidden_size": 64}
    plain, output = write_tiny("qwen3_vl_moe", tmp_path / "plain", **sizes), tmp_path / "out"
    done = quantize_checkpoint(str(plain), output, bits=4, group_size=16).summary
    assert set(done.stacked) == set(stacks(plain))
    copied = load_file(output / "model-00001.safetensors")
    assert all(torch.equal(copied[key], stack) for key, stack in stacks(plain).items())


@pytest.mark.full
@pytest.mark.one_is_quick
@pytest.mark.parametrize("is_saved_swapped", [False, True])
def test_saved_as_loaded(tmp_path, is_saved_swapped):
    """Experts that were rounded while loading are saved with the codes that the engine has."""
    plain, saved = write_tiny("qwen3_vl_moe", tmp_path / "plain", **SIZES), tmp_path / "saved"
    if is_saved_swapped:
        swap(plain)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    found = []
    for folder in (plain, saved):
        with LLM(str(folder), quantization="int4", block_size=16) as llm:
            (out,) = llm.generate([[5, 9, 200, 31]], params, use_tqdm=False)
            if folder == plain:
                llm.save(saved)
        found.append((out.outputs.token_ids, out.outputs.logprobs))
    assert found[0] == found[1]
    names = json.loads((saved / "model.safetensors.index.json").read_text())["weight_map"]
    assert any(".experts.0.gate_proj.weight_packed" in name for name in names)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:You passed:UserWarning")
@pytest.mark.parametrize("bits", [4, 8])
def test_transformers_loads_experts(tmp_path, bits):
    """transformers stacks the experts that it decompresses; it reads no zero points of experts."""
    pytest.importorskip("compressed_tensors", reason="needs the format's own library")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    sizes = {"head_dim": 16, "moe_intermediate_size": 32}
    plain, output = write_tiny("qwen3_moe", tmp_path / "plain", **sizes), tmp_path / "out"
    quantize_checkpoint(str(plain), output, bits=bits, group_size=32)
    other, _ = dequantised(output, bits, plain)
    kind, own = AutoModelForCausalLM, CompressedTensorsConfig(dequantize=True)
    found = kind.from_pretrained(output, quantization_config=own, dtype=torch.float32)
    expected = kind.from_pretrained(other, dtype=torch.float32)
    ids = torch.tensor([[5, 9, 200, 31, 7]])
    with torch.inference_mode():
        logits = expected(ids).logits
        assert (found(ids).logits - logits).norm() < 0.02 * logits.norm()


@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_codes(bits):
    """Symmetric codes use all values on both sides of 0; zeros stay zeros."""
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    weight[:, 64:] = 0
    own = round_groups(weight, Scheme(bits=bits, group_size=64, is_symmetric=True))
    free = round_groups(weight, Scheme(bits=bits, group_size=64))
    assert set(own.zeros.unique().tolist()) == {2 ** (bits - 1)}
    assert (own.codes[:, 64:] == 2 ** (bits - 1)).all()
    assert own.codes.min() == 0
    assert own.scales[:, 0].min() < 0 < own.scales[:, 0].max()
    assert free.squared_error < own.squared_error < 1.5 * free.squared_error
