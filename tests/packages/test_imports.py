"""Code shown to plugin authors imports only those modules of ours that the tutorial allows."""

import ast
import re
from pathlib import Path

import pytest

from mmdeploy_llm.testing.scaffold import KINDS, MEDIA
from mmdeploy_llm.testing.scaffold.package import package_names, render, template_of
from tests.test_architecture import PLUGIN_API

ROOT = Path(__file__).parents[2]
GUIDE = "".join(
    (ROOT / "docs" / page).read_text() for page in ("plugin_specs.md", "write_a_model.md")
)
EXAMPLE = ROOT / "examples" / "plugin_minimal"


def section(title):
    start = GUIDE.index(f"# {title}\n")
    return GUIDE[start : GUIDE.index("\n#", start)]


def allowed():
    """Returns the modules that the guide allows, and the package itself for its users."""
    names = re.findall(r"`(?:mmdeploy_llm)?(\.[\w.]+)`", section("What a plugin may import"))
    shared = re.findall(r"`(mmdeploy_llm_processors[\w.]+)`", section("Parts of media processors"))
    assert len(names) > 7
    assert len(shared) > 5
    return {*shared, *(f"mmdeploy_llm{name}" for name in names)}


def test_the_guide_allows_what_the_built_in_plugins_may_import():
    ours = {name for name in allowed() if not name.startswith("mmdeploy_llm_processors")}
    kit = {"testing", "testing.tiny"}
    assert ours == {f"mmdeploy_llm.{name}" for name in PLUGIN_API | kit}


def imported(code):
    """Returns the modules of this project that the code imports."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if re.match(r"mmdeploy_llm\b|mmdeploy_llm_", name)}


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("kind", "media"), [*((kind, None) for kind in KINDS), *(("model", kind) for kind in MEDIA)]
)
def test_new_packages(kind, media):
    files = render(template_of(kind, media), package_names("acme"))
    code = {path: text for path, text in files.items() if path.endswith(".py")}
    assert any("mmdeploy_llm.testing" in imported(text) for text in code.values())
    for path, text in code.items():
        own = {"mmdeploy_llm"} if path.startswith("tests/") else set()  # tests may run an engine
        assert imported(text) <= allowed() | own, path


@pytest.mark.parametrize("path", sorted(EXAMPLE.rglob("*.py")), ids=lambda path: path.name)
def test_the_complete_package(path):
    assert imported(path.read_text()) <= allowed()
    if "src" in path.parts:
        assert "mmdeploy_llm.testing" not in imported(path.read_text())
