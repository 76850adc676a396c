"""Scales of columns leave the products as they are, and lower the error of what is rounded where
some inputs are much larger than others."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmdeploy_llm import LLM
from mmdeploy_llm.checkpoints.quantize import quantize_checkpoint, scales
from mmdeploy_llm.checkpoints.quantize.folds import Fold, divided_norm, folds_of
from mmdeploy_llm.checkpoints.quantize.gptq import factor_of, output_error, round_by_factor
from mmdeploy_llm.checkpoints.quantize.scales import best_scales
from mmdeploy_llm.checkpoints.quantize.sites import Site, windows
from mmdeploy_llm.checkpoints.saving import GroupRounder
from mmdeploy_llm.checkpoints.saving.rounding import Scheme
from mmdeploy_llm.kernels.cpu import load
from mmdeploy_llm.layers import CausalLM, DecoderConfig, RotaryConfig
from mmdeploy_llm.testing.tiny import write_tiny
from mmdeploy_llm.weights.files import SafetensorsFile

SCHEME = Scheme(bits=4, group_size=32)
SIZES = {"hidden_size": 64, "num_attention_heads": 4}


def outliers():
    """Returns a weight [48, 96] and inputs [400, 96] of which a few columns are 30 times larger."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 96, generator=generator)
    x[:, ::24] *= 30
    return torch.randn(48, 96, generator=generator), x


@pytest.mark.parametrize("is_centred", [False, True])
def test_a_divided_norm_and_scaled_columns_are_the_same_product(is_centred):
    weight, x = outliers()
    norm = torch.linspace(0.3, 2, 96).bfloat16()
    wanted = torch.linspace(0.1, 8, 96)
    divided, own = divided_norm(norm, wanted, is_centred=is_centred)
    assert divided.dtype == norm.dtype
    offset = 1 if is_centred else 0
    before = (x * (norm.float() + offset)) @ weight.T
    after = (x * (divided.float() + offset)) @ (weight * own).T
    assert (after - before).norm() < 1e-5 * before.norm()
    assert not torch.equal(divided, norm)


def test_a_norm_of_zero_keeps_its_columns():
    divided, own = divided_norm(
        torch.tensor([0.0, 1.0]), torch.tensor([4.0, 4.0]), is_centred=False
    )
    assert divided.tolist() == [0, 0.25]
    assert own.tolist() == [1, 4]


def test_factor_of_divided_inputs():
    """What the scales do to the factor is what the moments of the divided inputs give."""
    _, x = outliers()
    own = torch.linspace(0.5, 2, 96)
    damped = x.T @ x + 1e3 * torch.eye(96)
    inverse = torch.linalg.inv((damped / own[:, None] / own).double())
    upper = torch.linalg.cholesky(inverse, upper=True).float()
    plain = torch.linalg.cholesky(torch.linalg.inv(damped.double()), upper=True).float()
    assert torch.allclose(plain * own, upper, rtol=1e-4, atol=1e-7)


def test_outputs_change_less_with_scales():
    weight, x = outliers()
    moments = x.T @ x
    factor = factor_of(moments)
    own = best_scales(weight, moments, factor, SCHEME, Fold())
    scaled = round_by_factor(weight, factor, SCHEME, own)
    plain = round_by_factor(weight, factor_of(moments), SCHEME)
    with_scales = output_error(weight, scaled, moments, own)
    assert with_scales < 0.9 * output_error(weight, plain, moments)
    rounded = (scaled.codes.float() - scaled.zeros.float().repeat_interleave(32, 1)) * (
        scaled.scales.float().repeat_interleave(32, 1)
    )
    wrong = (x / own) @ rounded.T - x @ weight.T
    assert with_scales == pytest.approx(float(wrong.square().sum()), rel=1e-3)


@pytest.mark.parametrize("is_parallel", [True, False])
def test_a_norm_that_attention_and_mlp_read_is_not_divided(is_parallel):
    model = CausalLM(
        DecoderConfig(
            vocab_size=8,
            hidden_size=16,
            intermediate_size=24,
            num_layers=1,
            num_heads=2,
            num_kv_heads=2,
            rotary=RotaryConfig(head_dim=8),
            norm_eps=1e-6,
            is_parallel=is_parallel,
        )
    )
    sites = [
        Site(name=f"model.layers.0.{name}", index=None, keys=(), k=16, scheme=SCHEME, is_whole=True)
        for name in ("self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight", "mlp.down_proj.weight")
    ]
    norms = [fold.norm for fold in folds_of(model, sites).values()]
    own = [
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
    ]
    assert norms == ([None] if is_parallel else [*own, None])


def test_heads_that_share_values_share_scales():
    fold = Fold(head=2, repeat=3)
    power = torch.arange(12.0)
    shared = fold.shared(power)
    assert shared.tolist() == [2, 3, 2, 3, 2, 3, 8, 9, 8, 9, 8, 9]
    assert fold.row_scales(shared).tolist() == [2, 3, 8, 9]


def scaled_copy(plain, output):
    """Writes the model with all its folds and random scales, unrounded; returns the kinds."""
    generator = torch.Generator().manual_seed(0)
    tensors = {k: v.float() for k, v in load_file(plain / "model.safetensors").items()}
    found = {}
    with (
        SafetensorsFile(plain / "model.safetensors") as file,
        LLM(str(plain), device="cpu", block_size=16) as llm,
    ):
        model = llm.model
        keys = {
            (target.name, target.index, target.rows and target.rows.start): key
            for key in tensors
            for target in model.weight_targets(key) or ()
        }
        for window in windows(model, [file], GroupRounder(SCHEME)):
            places = {(site.name, site.index): site for site in window.sites}
            for place, fold in folds_of(model, window.sites).items():
                site = places[place]
                own = fold.shared(torch.rand(site.k, generator=generator) * 3 + 0.3)
                if fold.norm is not None:
                    key = keys[fold.norm, None, None]
                    tensors[key], own = divided_norm(tensors[key], own, is_centred=fold.is_centred)
                else:
                    rows = keys[*fold.rows, fold.first_row]
                    tensors[rows] /= fold.row_scales(own)[:, None]
                for key in site.keys:
                    tensors[key] *= own
                found[place] = fold
    output.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (plain / name).exists():
            (output / name).write_bytes((plain / name).read_bytes())
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    return found


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3_moe"])
def test_a_scaled_model_is_the_same_model(tmp_path, family):
    """transformers' own model computes the same with all folds taken, in float32."""
    from transformers import AutoModelForCausalLM

    sizes = {"head_dim": 16} if family != "gemma2" else {}
    plain = write_tiny(family, tmp_path / "plain", hidden_size=64, **sizes)
    found = scaled_copy(plain, tmp_path / "scaled")
    kinds = {place[0].rpartition("layers.")[2].partition(".")[2] for place in found}
    wanted = {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"}
    if family == "qwen3_moe":  # has a layer without experts too
        wanted |= {"mlp.experts.down_proj"}
    assert {kind.removesuffix(".weight") for kind in kinds} == wanted
    ids = torch.tensor([[5, 9, 200, 31, 7, 44]])
    logits = []
    for name in ("plain", "scaled"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        with torch.no_grad():
            logits.append(model(ids).logits)
    assert (logits[1] - logits[0]).norm() < 1e-4 * logits[0].norm()


def test_biases_of_values_are_not_divided(tmp_path):
    plain = write_tiny("qwen2", tmp_path / "plain", **SIZES)  # biases of q, k and v
    found = scaled_copy(plain, tmp_path / "scaled")
    assert not any("o_proj" in name for name, _ in found)


@pytest.mark.full
@pytest.mark.skipif(load() is None, reason="needs the C++ kernels")
def test_a_model_with_outliers(tmp_path, monkeypatch):
    """Norms with a few large channels, whose weights are as large as the others."""
    plain = write_tiny("qwen3", tmp_path / "plain", hidden_size=64, head_dim=16)
    path = plain / "model.safetensors"
    tensors = load_file(path)
    for key, tensor in tensors.items():
        if key.endswith("layernorm.weight"):
            tensor[::16] *= 30
    save_file(tensors, path, metadata={"format": "pt"})
    lines = [{"prompt_token_ids": [5, 9, 200, 31, n, 2 * n, 3 * n, 77]} for n in range(3, 30)]
    given = tmp_path / "requests.jsonl"
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    gains = []
    for name, powers in (("with", scales.POWERS), ("without", ())):
        monkeypatch.setattr(scales, "POWERS", powers)
        done = quantize_checkpoint(
            str(plain),
            tmp_path / name,
            bits=4,
            group_size=32,
            calibrate_with=str(given),
            open_model=LLM,
        )
        gains.append(done.gain)
    assert gains[0] < 0.97 * gains[1]
