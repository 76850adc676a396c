"""A quantised copy is read as compressed-tensors reads it, and generates the tokens of the
dequantised weights."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.checkpoints.quantize import quantize_checkpoint
from mmdeploy_llm.checkpoints.saving import folders
from mmdeploy_llm.checkpoints.saving.rounding import Scheme, round_groups
from mmdeploy_llm.cli import app
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.testing.tiny import write_tiny

DEMO = Path(__file__).parents[3] / "examples" / "images"
SIZES = {"hidden_size": 64, "num_attention_heads": 4}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def dequantised(folder, bits, plain):
    """Returns a checkpoint with the weights that compressed-tensors decompresses."""
    pytest.importorskip("compressed_tensors", reason="needs the format's own library")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    groups = [QuantizationScheme(**own) for own in settings["config_groups"].values()]
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    tensors = load_file(folder / "model-00001.safetensors")
    found = {}
    for key, tensor in tensors.items():
        name, _, part = key.rpartition(".")
        if part == "weight_packed":
            state = {p: tensors[f"{name}.{p}"] for p in PARTS if f"{name}.{p}" in tensors}
            # In float32, so that its products with codes are not rounded either.
            state["weight_scale"] = state["weight_scale"].float()
            scheme = next((own for own in groups if is_target(name, own.targets)), groups[0])
            found[f"{name}.weight"] = compressor.decompress(state, scheme)["weight"].float()
        elif part not in PARTS:
            found[key] = tensor
    target = folder.with_name("dequantised")
    shutil.copytree(plain, target)
    save_file(found, target / "model.safetensors", metadata={"format": "pt"})
    return target, found


def is_target(name, targets):
    return any(
        target.startswith("re:") and re.match(target.removeprefix("re:"), name)
        for target in targets
    )


PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")


def tokens_of(folder):
    with LLM(str(folder), dtype="float32", block_size=16) as llm:
        return [out.outputs.token_ids for out in llm.generate([[5, 9, 200, 31, 7]], PARAMS)]


@pytest.mark.full
@pytest.mark.one_is_quick
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("family", "sizes"),
    [("qwen2", SIZES), ("qwen3_moe", {"head_dim": 16, "moe_intermediate_size": 32})],
)
def test_tokens(tmp_path, caplog, family, sizes, bits):
    plain, output = write_tiny(family, tmp_path / "plain", **sizes), tmp_path / "out"
    done = quantize_checkpoint(str(plain), output, bits=bits, group_size=32).summary
    other, values = dequantised(output, bits, plain)
    original = load_file(plain / "model.safetensors")
    assert values.keys() == original.keys()
    changed = {key for key in values if not torch.equal(values[key], original[key])}
    assert len(changed) == done.num_layers
    assert all("_proj.weight" in key for key in changed)
    with caplog.at_level("INFO", logger="mmdeploy_llm"):
        assert tokens_of(output) == tokens_of(other)
    assert "weights stay in few bits" in caplog.text
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_agrees_with_the_kernels(bits):
    from mmdeploy_llm.kernels.cpu import load

    kernels = load()
    if kernels is None:
        pytest.skip("needs the C++ kernels")
    weight = torch.randn(70, 256, generator=torch.Generator().manual_seed(0))
    ours = round_groups(weight, Scheme(bits=bits, group_size=64))
    theirs = kernels.round_codes(weight, bits, 64)
    assert (ours.scales.float() == theirs.scales).float().mean() > 0.98
    assert (ours.codes == theirs.codes()).float().mean() > 0.97


@pytest.mark.full
def test_command(tmp_path):
    plain, output = write_tiny("qwen2", tmp_path / "plain", **SIZES), tmp_path / "out"
    command = ["quantize", str(plain), str(output), "--group-size", "32"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "layers in int4, mean relative error" in result.output
    assert CliRunner().invoke(app, command).exit_code == 2
    assert CliRunner().invoke(app, [*command, "--overwrite"]).exit_code == 0


@pytest.mark.full
def test_captions_of_the_demo(tmp_path):
    """One command makes a copy in 4 bits, the next captions the demo's folder with it."""
    quantised, captions = tmp_path / "shapes-vl-int4", tmp_path / "captions.jsonl"
    done = CliRunner().invoke(app, ["quantize", "shapes-vl", str(quantised)])
    assert done.exit_code == 0, done.output
    words = ["caption", str(DEMO), "--model", str(quantised), "--output", str(captions)]
    done = CliRunner().invoke(app, [*words, "--no-report"])
    assert done.exit_code == 1, done.output  # one picture is truncated
    records = [json.loads(line) for line in captions.read_text().splitlines()]
    assert [record["error"] is None for record in records].count(False) == 1
    assert "circle" in "".join(record["text"] for record in records)


@pytest.mark.parametrize("is_folder", [True, False])
def test_what_the_user_keeps_is_not_removed(tmp_path, is_folder):
    plain, own = write_tiny("qwen2", tmp_path / "plain", **SIZES), tmp_path / "new.partial"
    if is_folder:
        own.mkdir()
        own = own / "mine.txt"
    own.write_text("mine")
    with pytest.raises(ConfigError, match=r"new\.partial is in the way"):
        quantize_checkpoint(str(plain), tmp_path / "new", bits=4, group_size=32)
    assert own.read_text() == "mine"


def test_refusals(tmp_path):
    plain = write_tiny("qwen2", tmp_path / "plain", **SIZES)

    def refused(match, model=plain, output=tmp_path / "new", size=32, **options):
        with pytest.raises(ConfigError, match=match):
            quantize_checkpoint(str(model), output, bits=4, group_size=size, **options)

    refused("multiple of 8", size=12)
    refused("no layer", size=56)
    refused("holds the model itself", output=plain, overwrite=True)
    (tmp_path / "file").touch()
    refused("is a file", output=tmp_path / "file", overwrite=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").touch()
    refused(r"no config\.json", output=tmp_path / "other", overwrite=True)
    quantize_checkpoint(str(plain), tmp_path / "out", bits=4, group_size=32)
    refused("quantised already", model=tmp_path / "out")


@pytest.mark.full
def test_towers_are_copied(tmp_path, caplog):
    plain, output = write_tiny("qwen2_5_vl", tmp_path / "plain", **SIZES), tmp_path / "out"
    quantize_checkpoint(str(plain), output, bits=4, group_size=32)
    other, values = dequantised(output, 4, plain)
    original = load_file(plain / "model.safetensors")
    changed = {key for key in values if not torch.equal(values[key], original[key])}
    assert changed
    assert not any("visual" in key for key in changed)
    ignored = json.loads((output / "config.json").read_text())["quantization_config"]["ignore"]
    assert any("visual" in name for name in ignored)
    with caplog.at_level("INFO", logger="mmdeploy_llm"):
        assert tokens_of(output) == tokens_of(other)
    assert "weights stay in few bits" in caplog.text


@pytest.mark.full
def test_several_shards(tmp_path, monkeypatch, caplog):
    plain = write_tiny("qwen2", tmp_path / "plain", **SIZES)
    whole, shards = tmp_path / "whole", tmp_path / "shards"
    quantize_checkpoint(str(plain), whole, bits=4, group_size=32)
    (tmp_path / "shards.partial").mkdir()
    (tmp_path / "shards.partial" / "left.safetensors").touch()  # by a run that was killed
    (tmp_path / "shards.partial" / folders.MARK).touch()
    monkeypatch.setattr("mmdeploy_llm.checkpoints.saving.writer.SHARD_BYTES", 20_000)
    quantize_checkpoint(str(plain), shards, bits=4, group_size=32)
    assert "of other options or weights left, is removed" in caplog.text
    assert not (shards / "left.safetensors").exists()
    assert len(list(shards.glob("*.safetensors"))) > 2
    assert tokens_of(shards) == tokens_of(whole)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("family", ["qwen2", "qwen2_5_vl"])
@pytest.mark.filterwarnings("ignore:You passed:UserWarning")
def test_transformers_loads_it(tmp_path, family):
    pytest.importorskip("compressed_tensors", reason="needs the format's own library")
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        CompressedTensorsConfig,
    )

    plain, output = write_tiny(family, tmp_path / "plain", **SIZES), tmp_path / "out"
    quantize_checkpoint(str(plain), output, bits=4, group_size=32)
    other, _ = dequantised(output, 4, plain)
    kind = AutoModelForCausalLM if family == "qwen2" else AutoModelForImageTextToText
    own = CompressedTensorsConfig(dequantize=True)
    found = kind.from_pretrained(output, quantization_config=own, dtype=torch.float32)
    expected = kind.from_pretrained(other, dtype=torch.float32)
    weights = found.state_dict()
    for key, tensor in expected.state_dict().items():
        torch.testing.assert_close(weights[key].float(), tensor, rtol=2**-7, atol=1e-6, msg=key)
