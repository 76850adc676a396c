"""Every value is loaded into its parameter; anything else raises an error that names the keys."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from mmdeploy_llm.errors import CheckpointError, ConfigError, PluginContractError
from mmdeploy_llm.layers import Linear
from mmdeploy_llm.weights import files
from mmdeploy_llm.weights.load import build_model
from mmdeploy_llm.weights.map import Target, WeightMap

CPU = torch.device("cpu")


@pytest.fixture
def load(tmp_path, factory, checkpoint):
    """Returns a function that writes tensors and builds the model from them."""

    def run(tensors, dtype=torch.float32):
        save_file(tensors, tmp_path / "model.safetensors")
        return build_model(factory, checkpoint, dtype, CPU)

    return run


class TestValues:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
    def test_every_kind_of_target(self, load, tensors, dtype, stored):
        tensors = {key: tensor.to(stored) for key, tensor in tensors.items()}
        model = load(tensors, dtype)
        wanted = {key: tensor.to(dtype) for key, tensor in tensors.items()}
        attn = model.attn.qkv_proj
        keys = ("attn.q", "attn.k", "old.attn.v")
        assert torch.equal(attn.weight, torch.cat([wanted[f"{k}.weight"] for k in keys]))
        keys = ("attn.q", "attn.k", "attn.v")
        assert torch.equal(attn.bias, torch.cat([wanted[f"{k}.bias"] for k in keys]))
        # routers stay in float32, whatever the dtype of the model
        assert torch.equal(model.gate.weight, tensors["gate.transposed"].T.float())
        assert torch.equal(model.gate.correction_bias, tensors["stacked"][1:].float())
        for i in range(3):
            names = [f"experts.{i}.{part}_proj.weight" for part in ("gate", "up")]
            gate_up = torch.cat([wanted[name] for name in names])
            assert torch.equal(model.experts.gate_up_proj[i], gate_up)
            down = wanted[f"experts.{i}.down_proj.weight"]
            assert torch.equal(model.experts.down_proj[i], down)

    def test_the_model_is_ready_to_use(self, load, tensors):
        model = load(tensors)
        assert not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())
        assert model.frequencies.tolist() == [1.0, 2.0]

    def test_small_staging_buffer(self, load, tensors, monkeypatch):
        monkeypatch.setattr(files, "STAGING_BYTES", 12)
        whole = torch.cat([tensors[k].bfloat16() for k in ("attn.q.bias", "attn.k.bias")])
        model = load(tensors, torch.bfloat16)
        assert torch.equal(model.attn.qkv_proj.bias[:6], whole)
        assert torch.equal(model.attn.qkv_proj.weight[:4], tensors["attn.q.weight"].bfloat16())

    def test_fused_names_are_accepted_too(self, load, tensors):
        parts = ("attn.q.weight", "attn.k.weight", "old.attn.v.weight")
        tensors["attn.qkv_proj.weight"] = torch.cat([tensors.pop(key) for key in parts])
        model = load(tensors)
        assert torch.equal(model.attn.qkv_proj.weight, tensors["attn.qkv_proj.weight"])

    @pytest.mark.parametrize(("index", "rows"), [(0, None), (2, None), (1, slice(0, 8))])
    def test_rows_of_one_of_several_stacked_tensors(
        self, load, tensors, factory, monkeypatch, index, rows
    ):
        own = factory.weight_targets
        target = Target(name="attn.qkv_proj.bias", rows=rows, source_index=index, source=rows)

        def targets(self, key):
            return (target,) if key == "three" else own(self, key)

        monkeypatch.setattr(factory, "weight_targets", targets)
        tensors["three"] = torch.randn(3, 8)
        model = load({key: value for key, value in tensors.items() if ".bias" not in key})
        assert torch.equal(model.attn.qkv_proj.bias, tensors["three"][index])

    @pytest.mark.parametrize("shape", [(2, 8), (0, 8), ()])
    def test_a_stack_that_is_too_short(self, load, tensors, factory, monkeypatch, shape):
        target = Target(name="attn.qkv_proj.bias", source_index=2)
        monkeypatch.setattr(factory, "weight_targets", lambda self, key: (target,))
        with pytest.raises(CheckpointError, match=r"three .* has shape .* needs \[8\]"):
            load({"three": torch.zeros(shape)})

    def test_a_stack_that_is_too_long(self, load, tensors, factory, monkeypatch):
        target = Target(name="attn.qkv_proj.bias", source_index=1, num_sources=2)
        monkeypatch.setattr(factory, "weight_targets", lambda self, key: (target,))
        with pytest.raises(CheckpointError, match=r"three .* has shape \[3, 8\]"):
            load({"three": torch.zeros(3, 8)})

    def test_ignored_keys(self, load, tensors, caplog):
        caplog.set_level("INFO", logger="mmdeploy_llm")
        load({**tensors, "unused.weight": torch.zeros(7)})
        assert "the model does not use 1 tensors of the checkpoint: unused.weight" in caplog.text

    def test_dummy_reads_nothing_and_is_always_the_same(self, factory, checkpoint):
        models = [build_model(factory, checkpoint, torch.float32, CPU, "dummy") for _ in "ab"]
        first, second = (dict(model.named_parameters()) for model in models)
        for name, parameter in first.items():
            assert torch.equal(parameter, second[name])
            assert 0 < parameter.abs().max() <= 0.02
        assert models[0].frequencies.tolist() == [1.0, 2.0]


class TestErrors:
    def test_missing_keys_are_named(self, load, tensors):
        del tensors["attn.k.weight"], tensors["stacked"]
        with pytest.raises(CheckpointError) as info:
            load(tensors)
        assert "attn.qkv_proj.weight (some values), gate.correction_bias" in str(info.value)

    def test_a_missing_last_part(self, load, tensors):
        del tensors["experts.2.down_proj.weight"]
        with pytest.raises(CheckpointError, match=r"experts\.down_proj \(some values\)"):
            load(tensors)

    def test_ten_surplus_keys_and_how_many_more(self, load, tensors):
        surplus = {f"extra.{i:02}": torch.zeros(1) for i in range(13)}
        with pytest.raises(CheckpointError, match="no parameters for") as info:
            load({**tensors, **surplus})
        assert "extra.09 and 3 more" in str(info.value)
        assert "extra.10" not in str(info.value)

    def test_a_value_filled_twice(self, load, tensors):
        tensors["attn.v.weight"] = torch.zeros(2, 8)  # beside old.attn.v.weight
        with pytest.raises(CheckpointError, match=r"another key fills.*attn\.v\.weight"):
            load(tensors)

    @pytest.mark.parametrize(
        ("key", "shape", "wanted"),
        [
            ("attn.q.weight", (5, 8), r"\[4, 8\]"),
            ("gate.transposed", (3, 8), r"\[8, 3\]"),
            ("stacked", (2, 4), r"\[1, 3\]"),
            ("experts.1.up_proj.weight", (6, 9), r"\[6, 8\]"),
            ("attn.q.bias", (), r"\[4\]"),
        ],
    )
    def test_shapes_that_differ(self, load, tensors, key, shape, wanted):
        tensors[key] = torch.zeros(shape)
        found = r"\[" + ", ".join(map(str, shape)) + r"\]"
        with pytest.raises(CheckpointError, match=f"{key} in .* has shape {found}.*{wanted}"):
            load(tensors)

    def test_integers_are_refused(self, load, tensors):
        tensors["attn.q.bias"] = torch.zeros(4, dtype=torch.int8)
        with pytest.raises(
            CheckpointError, match=r"attn\.q\.bias .* dtype int8, .* no quantization_config"
        ):
            load(tensors)

    @pytest.mark.parametrize("cut", [0, 4, 30, 2000])
    def test_cut_files(self, factory, checkpoint, tmp_path, tensors, cut):
        path = tmp_path / "model.safetensors"
        save_file(tensors, path)
        path.write_bytes(path.read_bytes()[:cut])
        with pytest.raises(CheckpointError, match="not a valid safetensors file"):
            build_model(factory, checkpoint, torch.float32, CPU)

    def test_a_file_of_too_many_tensors(self, factory, checkpoint, tmp_path, monkeypatch, tensors):
        save_file(tensors, tmp_path / "model.safetensors")
        monkeypatch.setattr("mmdeploy_llm.weights.files.MAX_TENSORS", len(tensors) - 1)
        with pytest.raises(CheckpointError, match=rf"holds {len(tensors)} tensors, .* are allowed"):
            build_model(factory, checkpoint, torch.float32, CPU)

    def test_a_git_lfs_pointer(self, factory, checkpoint, tmp_path):
        (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
        with pytest.raises(CheckpointError, match="Git LFS"):
            build_model(factory, checkpoint, torch.float32, CPU)

    def test_nothing_is_read_when_the_plan_is_wrong(self, load, tensors, monkeypatch):
        def fail(*args, **kwargs):
            raise AssertionError("read before the plan was checked")

        monkeypatch.setattr(files.SafetensorsFile, "read_into", fail)
        with pytest.raises(CheckpointError):
            load({**tensors, "extra": torch.zeros(1)})

    def test_load_format(self, factory, checkpoint):
        with pytest.raises(ConfigError, match="got 'pickle'"):
            build_model(factory, checkpoint, torch.float32, CPU, "pickle")

    def test_a_factory_that_builds_no_module(self, checkpoint):
        with pytest.raises(PluginContractError, match=r"nn\.Module, got dict"):
            build_model(lambda config: {}, checkpoint, torch.float32, CPU)

    def test_buffers_that_nobody_computes(self, checkpoint):
        class Forgetful(nn.Module):
            def __init__(self, config) -> None:
                super().__init__()
                self.register_buffer("table", torch.empty(2), persistent=False)

        with pytest.raises(PluginContractError, match="table"):
            build_model(Forgetful, checkpoint, torch.float32, CPU, "dummy")

    def test_targets_that_name_no_parameter(self, load, tensors, factory, monkeypatch):
        monkeypatch.setattr(factory, "weight_targets", lambda self, key: (Target(name="nowhere"),))
        with pytest.raises(PluginContractError, match="nowhere"):
            load(tensors)


class Wide(nn.Module):
    """A model of 48 matrices of 8 MB."""

    def __init__(self, config) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Linear(1024, 2048) for _ in range(48))
        self.weight_map = WeightMap(self)

    def weight_targets(self, key):
        return self.weight_map.targets(key)


MEASURE = """
import re, sys
from pathlib import Path
from types import SimpleNamespace
sys.path.insert(0, {tests!r})
import torch
from test_load import Wide
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm.weights.load import build_model

def peak():
    # not getrusage: its peak starts at that of the parent process
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", status)[1]) * 1024

before = peak()
checkpoint = Checkpoint(folder=Path({folder!r}), config=SimpleNamespace())
model = build_model(Wide, checkpoint, torch.{dtype}, torch.device("cpu"))
print(peak() - before)
"""


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory):
    """A checkpoint of 400 MB in float32."""
    folder = tmp_path_factory.mktemp("wide")
    tensors = {f"layers.{i}.weight": torch.zeros(2048, 1024) for i in range(48)}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
@pytest.mark.parametrize(("dtype", "share"), [("float32", 1.0), ("bfloat16", 0.5)])
def test_no_second_copy_of_the_model_in_memory(wide_folder, request, dtype, share):
    """Peak memory grows by the model's own size plus at most a third of the file."""
    script = MEASURE.format(tests=str(request.path.parent), folder=str(wide_folder), dtype=dtype)
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    size = (wide_folder / "model.safetensors").stat().st_size
    assert share * size < int(result.stdout) < (share + 0.35) * size


def test_unknown_and_unneeded_keys_are_told_apart(factory):
    model = factory(SimpleNamespace(size=8))
    assert model.weight_targets("nothing.like.this") is None
    assert model.weight_targets("unused.key") == ()
