"""A second start reads config and tokenizer from the cache; whatever is wrong with it, transformers
reads the model's files."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest
import transformers

from mmdeploy_llm.engine.startup.model_files import read_model_files
from mmdeploy_llm.engine.startup.parse_cache import ParseCache, stand_in
from mmdeploy_llm.engine.startup.parse_cache import cache as module
from mmdeploy_llm.engine.startup.parse_cache.stand_in import StandIn, own_of
from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import ModelSpec, PluginManager, hookimpl
from mmdeploy_llm.system.portable.files import make_fifo
from mmdeploy_llm.values.options.config import EngineConfig
from tests.weights.gguf.gguf_writing import write_gguf


@pytest.fixture
def model(tiny_copy, tmp_path):
    return tiny_copy("qwen2", tmp_path / "model")


@pytest.fixture
def read(tmp_path):
    """read(model, **options) -> what a start reads, and whether config and tokenizer stand in."""

    def files(model, **options):
        config = EngineConfig(model=str(model), **{"weight_cache": tmp_path / "kept", **options})
        found = read_model_files(config)
        return found, (_stands_in(found.checkpoint.config, found.tokenizer.raw))

    return files


def _stands_in(*values):
    return tuple(issubclass(type(each), StandIn) for each in values)


@pytest.fixture
def alone(monkeypatch):
    """Plugins import no transformers: the tests of this process have."""
    for each in (module, stand_in):
        monkeypatch.setattr(each, "LIBRARY", "no such module")


@pytest.fixture
def kept(read, model, alone, tmp_path):
    """The files of the cache after the first start."""
    assert read(model)[1] == (False, False)
    return sorted((tmp_path / "kept").glob("*.parsed"))


def test_the_second_start_asks_transformers_nothing(read, model, kept, monkeypatch):
    first, _ = read(model, weight_cache=False)
    for name in ("AutoConfig", "AutoTokenizer"):
        monkeypatch.setattr(transformers, name, None)
    second, are_stand_ins = read(model)
    assert are_stand_ins == (True, True)
    assert len(kept) == 2
    for name in ("text", "eos_token_ids", "spec", "chat_template", "rules"):
        assert getattr(second, name) == getattr(first, name)
    assert second.tokenizer.encode("Hello there") == first.tokenizer.encode("Hello there")
    assert not own_of(second.checkpoint.config).source.is_loaded
    assert not own_of(second.tokenizer.raw).source.is_loaded


def test_what_is_asked_of_transformers_is_the_same_model(read, model, kept):
    found, _ = read(model)
    first, _ = read(model, weight_cache=False)
    assert found.checkpoint.config.to_dict() == first.checkpoint.config.to_dict()
    assert found.tokenizer.raw.init_kwargs.keys() == first.tokenizer.raw.init_kwargs.keys()


def test_plugins_that_import_transformers_get_its_config(read, model, kept, monkeypatch):
    resolve = PluginManager.resolve

    def importing(own, spec):
        monkeypatch.setattr(module, "LIBRARY", "transformers")
        return resolve(own, spec)

    monkeypatch.setattr(PluginManager, "resolve", importing)
    assert read(model)[1] == (False, True)


def test_a_program_that_has_imported_transformers_gets_its_objects(read, model, kept, monkeypatch):
    monkeypatch.setattr(module, "LIBRARY", "transformers")
    assert read(model)[1] == (False, False)


class Foreign:
    @hookimpl
    def provide_models(self):
        return [ModelSpec(name="own", architectures=("OwnForCausalLM",), factory="own:Model")]


def test_plugins_of_other_packages_get_transformers_objects(read, model, kept, monkeypatch):
    load = PluginManager.load

    def with_foreign(*args, **kwargs):
        manager = load(*args, **kwargs)
        manager.register(Foreign(), "foreign")
        return manager

    monkeypatch.setattr(PluginManager, "load", with_foreign)
    assert read(model)[1] == (False, False)


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "added_tokens.json"]
)
def test_a_changed_file_is_read_anew(read, model, kept, name):
    path = model / name
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(values, indent=3))
    assert read(model)[1] == (False, False)
    assert read(model)[1] == (True, True)


def test_a_changed_value_is_seen(read, model, kept):
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**values, "rms_norm_eps": 0.25}))
    assert read(model)[0].checkpoint.config.rms_norm_eps == 0.25
    found, are_stand_ins = read(model)
    assert are_stand_ins[0]
    assert found.checkpoint.config.rms_norm_eps == 0.25


def test_a_file_that_became_malformed_is_refused(read, model, kept):
    (model / "config.json").write_text("{")
    with pytest.raises(CheckpointError):
        read(model)


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: bytes(len(data)),
        lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:],
    ],
)
def test_a_damaged_file_is_written_again(read, model, kept, damage, caplog):
    whole = [path.read_bytes() for path in kept]
    for path, data in zip(kept, whole, strict=True):
        path.write_bytes(damage(data))
    assert read(model)[1] == (False, False)
    assert "is not whole" in caplog.text
    assert [path.read_bytes() for path in kept] == whole
    assert read(model)[1] == (True, True)


def test_files_that_changed_places_are_not_used(read, model, kept):
    one, other = (path.read_bytes() for path in kept)
    kept[0].write_bytes(other)
    kept[1].write_bytes(one)
    assert read(model)[1] == (False, False)


@pytest.mark.one_is_quick
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such permissions")
@pytest.mark.parametrize("case", ["file", "folder", "fifo"])
def test_what_others_may_write_is_not_used(read, model, kept, case, caplog):
    if case == "fifo":
        for path in kept:
            path.unlink()
            make_fifo(path)
    for path in [kept[0].parent] if case == "folder" else kept if case == "file" else []:
        os.chmod(path, path.stat().st_mode | 0o022)
    assert read(model)[1] == (False, False)
    assert any(record.levelno == logging.WARNING for record in caplog.records)


def test_what_cannot_be_kept_is_told(read, model, alone, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    assert read(model, weight_cache_size=1)[1] == (False, False)
    assert "not kept for the next start" in caplog.text
    assert not list((tmp_path / "kept").glob("*.*"))


@pytest.mark.full
def test_the_config_of_a_gguf_file_is_made_anew(read, model, kept, monkeypatch):
    """What a file's metadata say is made into a config by tables of plugins, which no key of the
    cache covers, and a tokenizer of the file is read from it: of neither anything is kept, with a
    config.json beside the file neither."""
    folder = kept[0].parent
    for path in kept:
        path.unlink()
    write_gguf(model, model / "model.gguf", "qwen2")
    (model / "model.safetensors").unlink()
    for change in (lambda: None, (model / "config.json").unlink):
        change()
        for place in (model, model / "model.gguf") * 2:
            found, are_stand_ins = read(place)
            assert found.checkpoint.gguf_files, place
            assert are_stand_ins == (False, False), place
    assert not list(folder.glob("*.parsed"))


def test_a_full_disk_is_told(read, model, alone, tmp_path, monkeypatch, caplog):
    def full(path):
        raise OSError("No space left on device")

    monkeypatch.setattr(module.folder, "new_file", full)
    assert read(model)[1] == (False, False)
    assert "No space left" in caplog.text


@pytest.mark.parametrize(("option", "count"), [(True, 1), (False, 0)])
def test_small_models_are_kept_too(model, alone, tmp_path, monkeypatch, option, count):
    """A config takes transformers a second to read, however small the model is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    config = EngineConfig(model=str(model), weight_cache=option)
    ParseCache(config, PluginManager.load()).checkpoint(model)
    assert len(list(tmp_path.rglob("*.parsed"))) == count


PROGRAM = """
import sys
from mmdeploy_llm import LLM, SamplingParams
llm = LLM(sys.argv[1], weight_cache=sys.argv[2], quiet=True, max_model_len=64, num_threads=1)
params = SamplingParams(temperature=0, max_tokens=4, bad_words=["x"])
print(llm.generate("Hello", params, use_tqdm=False)[0].outputs.token_ids)
print("transformers" in sys.modules)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "imports"),
    [("qwen2", False), ("qwen2_5_vl", False), ("gemma4", True)],
)
def test_a_program_imports_transformers_only_where_it_computes(
    tiny_folder, tmp_path, family, imports
):
    command = [sys.executable, "-c", PROGRAM, str(tiny_folder(family)), str(tmp_path / "kept")]
    runs = [
        subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split("\n")
        for _ in range(2)
    ]
    assert runs[0][0] == runs[1][0]
    assert runs[1][1] == str(imports)
