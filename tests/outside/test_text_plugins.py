"""Text families of examples/plugins, each a file of a few lines that an outsider could have
written, pass the conformance kit and compute what transformers does."""

import importlib
import sys
from pathlib import Path

import pytest

from mmdeploy_llm.testing import ModelConformance, PluginConformance
from mmdeploy_llm.tiny import text_family, write_family

PLUGINS = Path(__file__).parents[2] / "examples" / "plugins"
sys.path.append(str(PLUGINS))
MAX_LINES = {"phi3": 60, "cohere2": 60, "starcoder2": 60}


def spec_of(name):
    """Imports the file, as whoever puts its folder on the path does, and returns its model."""
    return importlib.import_module(name).provide_models()[0]


@pytest.mark.parametrize("name", MAX_LINES)
def test_the_file_is_short(name):
    assert len((PLUGINS / f"{name}.py").read_text().splitlines()) <= MAX_LINES[name]


class Family(ModelConformance):
    """A family with a tiny checkpoint of this class in transformers, with these fields."""

    __test__ = False
    architecture = ""
    fields = {}  # noqa: RUF012

    @classmethod
    def write(cls, folder):
        write_family(text_family(cls.architecture, **cls.fields), folder)


class TestPhi3Plugin(PluginConformance):
    plugin = "phi3"


class TestPhi3(Family):
    __test__ = True
    spec = spec_of("phi3")
    architecture = "Phi3ForCausalLM"
    fields = {"sliding_window": 9}  # noqa: RUF012


class TestCohere2(Family):
    __test__ = True
    spec = spec_of("cohere2")
    architecture = "Cohere2ForCausalLM"
    fields = {"logit_scale": 0.5, "sliding_window": 7, "num_hidden_layers": 4}  # noqa: RUF012


class TestStarcoder2(Family):
    __test__ = True
    spec = spec_of("starcoder2")
    architecture = "Starcoder2ForCausalLM"
    fields = {"sliding_window": 7}  # noqa: RUF012
