"""The pytest plugin: short reports of failed checks, and fixtures for plugin authors.

pytest loads it in every run in an environment with this package, so its top level must import no
heavy package.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mmdeploy_llm.hooks import PluginManager


CLASSES = pytest.StashKey[list[type[Any]]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Reports a failed check by its message, without the kit's traceback; --full-trace shows the
    traceback."""
    report = yield
    if call.excinfo is not None and not item.config.getoption("fulltrace"):
        from mmdeploy_llm.testing.models.base import CheckFailed

        if isinstance(call.excinfo.value, CheckFailed):
            report.longrepr = f"{item.name}: {call.excinfo.value}"
    return report


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keeps the test classes of this run, for the summary."""
    classes = {getattr(item, "cls", None) for item in session.items}
    session.config.stash[CLASSES] = [each for each in classes if each is not None]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Names what the plugins under test provide and no test class of this run tries."""
    classes = config.stash.get(CLASSES, [])
    if "mmdeploy_llm.testing.conformance" not in sys.modules or not classes:
        return
    from mmdeploy_llm.testing.models.base import CheckFailed, CheckSkipped

    from .untried import untried

    try:
        lines = untried(classes)
    except (CheckFailed, CheckSkipped):
        return  # a plugin that does not load; its tests say so
    if lines:
        terminalreporter.section("mmdeploy_llm: what no test class tries")
        terminalreporter.write("".join(f"{line}\n" for line in sorted(lines)))


@pytest.fixture
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny_checkpoint(config, **options) -> folder, see mmdeploy_llm.testing.write_checkpoint."""
    from .checkpoint import write_checkpoint

    def write(config: Any, **options: Any) -> Path:
        return write_checkpoint(config, tmp_path_factory.mktemp("tiny"), **options)

    return write


@pytest.fixture
def plugin_manager() -> Callable[..., PluginManager]:
    """plugin_manager(module, ...) -> PluginManager with these plugins and no others."""
    from .fakes import fake_manager

    return fake_manager
