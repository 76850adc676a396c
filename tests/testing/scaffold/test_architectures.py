"""The table of supported architectures in the guide equals the registered plugins."""

from pathlib import Path

import pytest

from mmdeploy_llm import ConfigError
from mmdeploy_llm.hooks import ModelSpec, PluginManager, hookimpl
from mmdeploy_llm.hooks.versions import OUR_DISTRIBUTION
from mmdeploy_llm.testing.scaffold import architectures

PAGE = Path(__file__).parents[3] / "docs/architectures.md"
COMMAND = "python -m mmdeploy_llm.testing.scaffold.architectures docs/architectures.md"


class Acme:
    @hookimpl
    def provide_models(self):
        one = ModelSpec(
            name="z",
            architectures=("ZForCausalLM",),
            factory="a:b",
            media=("chart",),
            draft_head="a:c",
        )
        any_other = ModelSpec(name="any", architectures=("*",), factory="a:b", tools="t")
        return [any_other, one]


class Spare:
    @hookimpl
    def provide_models(self):
        return [ModelSpec(name="y", architectures=("ZForCausalLM",), factory="a:b", priority=-1)]


def test_the_page_is_up_to_date():
    text = PAGE.read_text()
    table = architectures.table(PluginManager.load(), OUR_DISTRIBUTION)
    assert architectures.replaced(text, table) == text, f"update it with: {COMMAND}"


def test_a_row_for_each_architecture_names_the_model_that_serves_it():
    manager = PluginManager()
    manager.register(Acme(), "acme")
    manager.register(Spare(), "spare")
    assert architectures.table(manager).splitlines()[2:] == [
        "| `ZForCausalLM` | `z` | `acme` | text, chart |  |  | `mtp` |",
        "| any other of transformers | `any` | `acme` | text |  | `t` |  |",
    ]
    assert len(architectures.table(manager, "other-package").splitlines()) == 2


def test_update_writes_between_the_markers(tmp_path):
    file = tmp_path / "README.md"
    file.write_text(f"a\n{architectures.BEGIN}\nold\n{architectures.END}\nb\n")
    architectures.main([str(file)])
    text = file.read_text()
    assert text.startswith(f"a\n{architectures.BEGIN}\n| architecture |")
    assert text.endswith(f"|\n{architectures.END}\nb\n")
    assert "`Qwen2ForCausalLM`" in text
    assert "old" not in text


def test_a_file_without_markers_is_an_error(tmp_path):
    file = tmp_path / "README.md"
    file.write_text("nothing")
    with pytest.raises(ConfigError, match="0 sections"):
        architectures.main([str(file)])
