"""Text families of examples/plugins, each a file of a few lines that an outsider could have
written, pass the conformance kit and compute what transformers does."""

from itertools import takewhile
from pathlib import Path

import pytest

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.testing import ModelConformance
from mmdeploy_llm.testing.check import check_plugin
from mmdeploy_llm.testing.tiny import text_family, write_family

PLUGINS = Path(__file__).parents[2] / "examples" / "plugins"
MAX_LINES = 60


def spec_of(name):
    """Loads the file as LLM(plugins=[file]) does, and returns its model."""
    (spec,) = PluginManager.load(plugins=(), files=[PLUGINS / f"{name}.py"]).models
    return spec


@pytest.mark.parametrize(
    "name",
    [
        "phi3",
        # A process that imports torch for each.
        pytest.param("cohere2", marks=pytest.mark.full),
        pytest.param("starcoder2", marks=pytest.mark.full),
    ],
)
def test_the_file_is_short_and_keeps_the_contract_of_plugins(name):
    file = PLUGINS / f"{name}.py"
    assert len(file.read_text().splitlines()) <= MAX_LINES
    # What it provides, which comes after the file itself, is checked by the classes below.
    verdicts = list(takewhile(lambda verdict: not verdict.subject, check_plugin(str(file))))
    assert [verdict for verdict in verdicts if verdict.outcome == "fail"] == []
    assert any(verdict.outcome == "pass" for verdict in verdicts)


class Family(ModelConformance):
    """A family with a tiny checkpoint of this class in transformers, with these fields."""

    __test__ = False
    _architecture = ""
    _fields = {}  # noqa: RUF012

    @classmethod
    def write(cls, folder):
        write_family(text_family(cls._architecture, **cls._fields), folder)


class TestPhi3(Family):
    __test__ = True
    spec = spec_of("phi3")
    _architecture = "Phi3ForCausalLM"
    _fields = {"sliding_window": 9}  # noqa: RUF012


@pytest.mark.full
class TestCohere2(Family):
    __test__ = True
    spec = spec_of("cohere2")
    _architecture = "Cohere2ForCausalLM"
    _fields = {"logit_scale": 0.5, "sliding_window": 7, "num_hidden_layers": 4}  # noqa: RUF012


@pytest.mark.full
class TestStarcoder2(Family):
    __test__ = True
    spec = spec_of("starcoder2")
    _architecture = "Starcoder2ForCausalLM"
    _fields = {"sliding_window": 7}  # noqa: RUF012


def test_an_engine_serves_the_file_before_the_built_in_family(tiny_folder, transformers_of):
    folder, prompt = tiny_folder("phi3"), [5, 9, 200, 31, 7, 77, 78, 79, 80, 40, 41]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    file = str(PLUGINS / "phi3.py")
    with LLM(str(folder), plugins=[file], dtype="float32", quiet=True) as llm:
        assert llm.plugins.owner(llm.plugins.model_for(["Phi3ForCausalLM"])) == "phi3.py"
        (output,) = llm.generate(prompt, params, use_tqdm=False)
    expected = transformers_of(folder).generate(prompt, 6)
    assert list(output.outputs.token_ids) == list(expected)
