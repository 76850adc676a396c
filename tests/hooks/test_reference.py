"""The reference of the plugin API: what is generated stands in it, and all that is recorded.

test_doors.py runs the examples."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from mmdeploy_llm.hooks import API_VERSION

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/plugin_reference.md").read_text()


@pytest.fixture(scope="module")
def pages():
    """The module that writes the generated part of the page."""
    path = ROOT / "docs/surface_pages.py"
    spec = importlib.util.spec_from_file_location("surface_pages", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_hooks_are_those_of_the_code(pages):
    assert pages.fill_hooks(PAGE) == PAGE, "run: python docs/hooks.py"


def test_all_that_is_recorded_is_in_the_reference(pages):
    recorded = json.loads((ROOT / "tests/hooks/surface.json").read_text())
    text = pages.fill(PAGE)
    entries = set(re.findall(r"^#### (\w+)$", text, re.MULTILINE))
    members = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    lost = [name for name in recorded if name.rpartition(".")[2] not in entries | members]
    assert lost == []
    assert "Turns one kind of media into model inputs" in text
    assert "Returns the model inputs of an item from `decode`" in text


def test_the_version_stands_beside_the_policy():
    assert f"`MMDEPLOY_LLM_API = {API_VERSION}`" in PAGE
