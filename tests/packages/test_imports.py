"""Code shown to plugin authors imports only those modules of ours that plugins/README.md allows."""

import ast
import re
from pathlib import Path

import pytest

from mmdeploy_llm.scaffold import KINDS
from mmdeploy_llm.scaffold.package import package_names, render

ROOT = Path(__file__).parents[2]
README = (ROOT / "plugins" / "README.md").read_text()
EXAMPLE = ROOT / "examples" / "plugin_minimal"


def allowed():
    """Returns the modules that the guide allows, and the package itself for its users."""
    start = README.index("## What a plugin may import")
    names = re.findall(
        r"`(?:mmdeploy_llm)?(\.[\w.]+)`", README[start : README.index("##", start + 5)]
    )
    assert len(names) > 7
    return {f"mmdeploy_llm{name}" for name in names}


def imported(code):
    """Returns the modules of this project that the code imports."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if re.match(r"mmdeploy_llm\b|mmdeploy_llm_", name)}


@pytest.mark.parametrize("kind", KINDS)
def test_new_packages(kind):
    files = render(kind, package_names("acme"))
    code = {path: text for path, text in files.items() if path.endswith(".py")}
    assert any("mmdeploy_llm.testing" in imported(text) for text in code.values())
    for path, text in code.items():
        assert imported(text) <= allowed(), path


@pytest.mark.parametrize("path", sorted(EXAMPLE.rglob("*.py")), ids=lambda path: path.name)
def test_the_complete_package(path):
    assert imported(path.read_text()) <= allowed()
    if "src" in path.parts:
        assert "mmdeploy_llm.testing" not in imported(path.read_text())
