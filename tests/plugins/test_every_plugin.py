"""Every in-tree plugin passes what `plugins check` runs."""

import tomllib
from pathlib import Path

import pytest

from mmdeploy_llm.testing import check_plugin

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMES = sorted(PROJECT["entry-points"]["mmdeploy_llm"])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] * (name not in ("image", "qwen", "sources")))
        for name in NAMES
    ],
)
def test_plugins_check_finds_nothing(name):
    verdicts = list(check_plugin(name))
    assert [verdict for verdict in verdicts if verdict.outcome == "fail"] == []
    assert any(verdict.outcome == "pass" for verdict in verdicts)
