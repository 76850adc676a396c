"""Counts the lines that tests run, at a tenth of what a tracer costs. Used with
`pytest -p tests.line_coverage`.

    import of a module --SlipCover: a probe in each line--> probes that were reached are taken out
    end of each process --its lines--> the first process --coverage--> the report

Fails the run below 97 %. The options are those of coverage in pyproject.toml.
"""

import sys
from collections import defaultdict

import coverage
import pytest
from slipcover.importer import FileMatcher, SlipcoverMetaPathFinder, wrap_pytest
from slipcover.slipcover import Slipcover

from tests.tree import HOMES, ROOT, shipped

MATCHER = FileMatcher(tuple(str(home / package) for package, home in HOMES.items()))
CONFIG = ROOT / "pyproject.toml"
LEAST = 97.0  # percent


class LineCoverage:
    """The lines of this process, and in the first process those of all."""

    def __init__(self):
        self.probes = Slipcover()
        self.lines = defaultdict(set)  # by file
        sys.meta_path.insert(0, SlipcoverMetaPathFinder(self.probes, MATCHER))
        wrap_pytest(self.probes, MATCHER)  # its hook imports what packages with a plugin hold

    def add(self, files):
        """Adds the lines of a process."""
        for name, lines in files.items():
            self.lines[str(ROOT / name)].update(lines)

    def here(self):
        """Returns the lines of this process, by file."""
        files = self.probes.get_coverage()["files"]
        return {name: list(found["executed_lines"]) for name, found in files.items()}

    def report(self, file):
        """Writes the report and returns the percentage."""
        data = coverage.CoverageData(basename=str(ROOT / ".coverage"))
        data.erase()
        data.add_lines(self.lines)
        packages = (found.parent for found in shipped("__init__.py").values())
        data.touch_files(str(path) for folder in packages for path in folder.glob("*.py"))
        data.write()
        options = {
            "data_file": str(ROOT / ".coverage"),
            "config_file": str(ROOT / "pyproject.toml"),
        }
        total = coverage.Coverage(**options)
        total.load()
        return total.report(file=file, skip_covered=True)


LINES = LineCoverage()  # before pytest loads the plugins of packages, ours among them


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["lines"] = LINES.here()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    LINES.add(getattr(node, "workeroutput", {}).get("lines", {}))


def pytest_terminal_summary(terminalreporter):
    LINES.add(LINES.here())
    terminalreporter.section("coverage")
    percent = LINES.report(terminalreporter)
    terminalreporter.write_line(f"{percent:.2f} % of the lines; {LEAST} % are needed")
    if percent < LEAST:
        terminalreporter._session.exitstatus = pytest.ExitCode.TESTS_FAILED
