"""A plugin of another package brings its tiny checkpoint: it is found by the family's name."""

import json
import sys

import pytest

from mmdeploy_llm.errors import PluginContractError
from mmdeploy_llm.hooks import ModelSpec
from mmdeploy_llm.testing import ModelConformance, make_tokenizer, write_tiny
from mmdeploy_llm.testing.tiny import MediaForm, families, family_of, form_of

ACME = """
@hookimpl
def provide_models():
    return [
        ModelSpec(name="acme", architectures=("AcmeForCausalLM", "SeedOssForCausalLM"),
                  factory="json:loads", tiny="acme_tiny:ACME"),
        ModelSpec(name="wrong", architectures=("Wrong",), factory="json:loads", tiny="json:loads"),
    ]
"""
TINY = """
from mmdeploy_llm.testing.tiny import CHATML, Family, MediaForm, text_config
from transformers import SeedOssConfig

def make_config(tokenizer, options):
    return SeedOssConfig(**text_config(tokenizer, options, head_dim=24))

ACME = Family(
    architecture="SeedOssForCausalLM", make_config=make_config, chat_template=CHATML,
    eos_token="<|im_end|>", special_tokens=("<acme>",), files={"acme.json": {"a": 1}},
    media=MediaForm(merge_size=lambda config: 7),
)
"""


@pytest.fixture
def acme(tmp_path, monkeypatch, load_file):
    """Installs the package acme-llm, whose specs name the tiny checkpoint in another module."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    site = load_file("hooks/conftest.py").Site(folder)
    (folder / "acme_tiny.py").write_text(TINY)
    site.install("acme", ACME)
    yield
    for module in (*site.modules, "acme_tiny"):
        sys.modules.pop(module, None)


def test_it_is_written_by_name(acme, tmp_path):
    write_tiny("acme", tmp_path / "model", num_hidden_layers=1)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["architectures"], config["num_hidden_layers"]) == (["SeedOssForCausalLM"], 1)
    assert json.loads((tmp_path / "model" / "acme.json").read_text()) == {"a": 1}
    assert len(make_tokenizer("acme").tokenize("<acme>")) == 1


def test_listing_it_imports_nothing_of_it(acme):
    assert "acme" in families()
    assert "acme_tiny" not in sys.modules


def test_its_architectures_have_its_form_of_media(acme):
    assert form_of(["AcmeForCausalLM"]).merge_size(None) == 7
    assert form_of(["UnknownForCausalLM"]) == form_of(None) == MediaForm()


def test_something_else_is_refused(acme, tmp_path):
    with pytest.raises(PluginContractError, match=r"'wrong'.* must name a Family"):
        write_tiny("wrong", tmp_path)
    with pytest.raises(KeyError, match="did you mean 'acme'"):
        write_tiny("acne", tmp_path)


def test_a_conformance_class_writes_it(acme, tmp_path):
    class Acme(ModelConformance):
        spec = families()["acme"]

    Acme.write(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    Acme.spec = ModelSpec(name="bare", architectures=("Bare",), factory="json:loads")
    with pytest.raises(NotImplementedError, match="or give the spec `tiny`"):
        Acme.write(tmp_path)


def test_every_family_of_this_package_has_one():
    installed = families()
    assert {family_of(spec).architecture in spec.architectures for spec in installed.values()} == {
        True
    }
