"""Shared by the tests of plugins that an outsider could have written."""

import functools
from pathlib import Path

import pytest

from mmdeploy_llm.testing.plugins import fresh, probe

PLUGINS = Path(__file__).parents[2] / "examples" / "plugins"
MODULES = {"places", "toolbox", "warc"}  # the others are loaded as files


@pytest.fixture(scope="session", autouse=True)
def one_process_for_all():
    """One process imports all of them, when the first asks what that changes: each imports torch,
    which takes seconds."""
    files = [str(path) for path in sorted(PLUGINS.glob("*.py")) if path.stem not in MODULES]
    names, alone = [*sorted(MODULES), *files], fresh.changes_of
    found = functools.cache(lambda: alone(names))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            fresh, "changes_of", lambda asked: found() if {*asked} <= {*names} else alone(asked)
        )
        patch.setattr(probe, "CHANGES", "")
        yield
