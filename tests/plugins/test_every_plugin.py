"""Every in-tree plugin passes what `plugins check` runs."""

import json
import sys
import tomllib
from pathlib import Path

import pytest

from mmdeploy_llm.hooks.validation import PROVIDED
from mmdeploy_llm.testing import PluginConformance, check_plugin
from mmdeploy_llm.testing.plugins import fresh
from mmdeploy_llm.testing.plugins.plugin_subject import PluginSubject

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMES = sorted(PROJECT["entry-points"]["mmdeploy_llm"])


UNTOUCHED = """
import sys
assert not {"mmdeploy_llm_plugins", "mmdeploy_llm_processors"} & {*sys.modules}
"""


@pytest.mark.full  # a process imports all plugins
def test_importing_them_changes_nothing(run_program):
    modules = list(PROJECT["entry-points"]["mmdeploy_llm"].values())
    done = run_program(UNTOUCHED + fresh.PROBE, json.dumps([sys.path, modules, [*PROVIDED]]))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.rpartition("PROBE")[2])
    assert found == {module: [None, None] for module in modules}


QUICK = ("llama", "sources")
# One of each kind. The parsers and processors of the others run the same checks, with more
# examples, in reasoning/ and tests/processors; models of transformers, in transformers_any/.
FULL = ("logits", "paddleocr", "remote", "tools")


def marked(name):
    if name in QUICK:
        return name
    return pytest.param(name, marks=pytest.mark.full if name in FULL else pytest.mark.long)


@pytest.mark.full
@pytest.mark.parametrize("name", [marked(name) for name in NAMES])
def test_plugins_check_finds_nothing(name):
    verdicts = list(check_plugin(name))
    assert [verdict for verdict in verdicts if verdict.outcome == "fail"] == []
    assert any(verdict.outcome == "pass" for verdict in verdicts)


@pytest.mark.full
class TestHooksOfTheOthers(PluginConformance):
    """The checks of a plugin as a whole."""

    @pytest.fixture(scope="class", params=[name for name in NAMES if name not in (*QUICK, *FULL)])
    @classmethod
    def subject(cls, request):
        return PluginSubject.of(request.param)
