"""A third-party package brings its family whole: model, tiny checkpoint, GGUF table."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
from safetensors.torch import load_file

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.errors import ModelNotSupportedError, PluginConflictError
from mmdeploy_llm.hooks import ModelSpec, PluginManager, hookimpl
from mmdeploy_llm.testing.models.reference import Reference
from mmdeploy_llm.testing.tiny import write_family, write_tiny
from mmdeploy_llm.weights.folder import read_checkpoint

from .acme_llm.tiny import TINY
from .gguf_writing import add_metadata, add_tensor, add_tokenizer, permuted

PACKAGE = Path(__file__).parent / "acme_llm"
PROMPTS = ([5, 9, 200, 31, 7, 77, 78, 79, 80], [40, 41, 42])
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """Installs the package as pip does: a folder and its metadata on sys.path."""
    site = tmp_path / "site"
    shutil.copytree(PACKAGE, site / "acme_llm")
    info = site / "acme_llm-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-llm\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mmdeploy_llm]\nacme = acme_llm\n")
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_llm"]:
        del sys.modules[name]


def write_acme(folder, path):
    """Writes a checkpoint of Acme as a GGUF file."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "acme")
    add_metadata(writer, "acme", config)
    writer.kv_data[0].pop("acme.attention.layer_norm_rms_epsilon")
    writer.add_float32("acme.epsilon", config["rms_norm_eps"])
    add_tokenizer(writer, folder)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for key, tensor in load_file(folder / "model.safetensors").items():
        name = names.get_name(key, try_suffixes=(".weight",)).replace("ffn_down", "acme_down")
        if key.endswith("norm.weight"):
            tensor = tensor + 1
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            tensor = permuted(tensor, config[heads]) if part in key else tensor
        add_tensor(writer, name, tensor, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def file(tmp_path):
    source = write_family(TINY, tmp_path / "source")
    (tmp_path / "place").mkdir()
    return write_acme(source, tmp_path / "place" / "acme.gguf")


def answers(model):
    """Returns tokens for each prompt, of Acme's model."""
    with LLM(model=str(model), dtype="float32", max_model_len=256, quiet=True) as llm:
        assert llm.plugins.owner(llm.plugins.model_for(["SeedOssForCausalLM"])) == "acme"
        outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in PROMPTS], PARAMS)
    return [list(output.outputs.token_ids) for output in outputs]


@pytest.mark.full
def test_a_package_brings_its_tiny_checkpoint_and_its_table(acme, tmp_path, file):
    folder = write_tiny("acme", tmp_path / "tiny")
    reference = Reference(folder)
    expected = [reference.generate(ids, 6) for ids in PROMPTS]
    assert answers(folder) == expected
    assert answers(file) == expected


def test_the_plugins_of_an_engine_decide(acme, file):
    """A blocked plugin reads nothing."""
    assert read_checkpoint(file).gguf_tables == ("acme_llm.gguf:TABLE",)
    with pytest.raises(ModelNotSupportedError, match="'acme' cannot be read; known: command-r"):
        LLM(model=str(file), blocked_plugins=("acme",))


def plugin_with(table, priority=0):
    @hookimpl
    def provide_models():
        spec = ModelSpec(
            name="other",
            architectures=("OtherForCausalLM",),
            factory="json:loads",
            gguf=table,
            priority=priority,
        )
        return (spec,)

    return SimpleNamespace(provide_models=provide_models, __name__="other_llm")


@pytest.mark.parametrize(
    ("table", "reason"), [("no_such:TABLE", "No module"), ("json:loads", "must be a GGUFT")]
)
def test_a_table_that_is_none(file, table, reason):
    """It is named where it is missed, and hides no other table."""
    plugins = PluginManager.load()
    plugins.register(plugin_with(table), "other")
    with pytest.raises(
        ModelNotSupportedError, match=rf"'acme' cannot .*\n - plugin 'other'.*{reason}"
    ):
        read_checkpoint(file, plugins)


def test_two_tables_of_an_architecture(acme, file, tmp_path):
    (tmp_path / "site" / "copied_table.py").write_text("from acme_llm.gguf import TABLE\n")
    plugins = PluginManager.load()
    plugins.register(plugin_with("copied_table:TABLE"), "other")
    message = r"architecture 'acme' of GGUF files comes from plugin 'acme' .* from plugin 'other'"
    with pytest.raises(PluginConflictError, match=message):
        read_checkpoint(file, plugins)
    plugins = PluginManager.load()
    plugins.register(plugin_with("copied_table:TABLE", priority=1), "other")
    assert read_checkpoint(file, plugins).gguf_tables == ("copied_table:TABLE",)
