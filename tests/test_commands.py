"""README.md, the Makefile and .ci/run name the same commands; `make` installs what tests need."""

import ast
import re
import shlex
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
# What CI runs in place of a command of the guides, because it includes that command.
LARGER = {"test": "test-all"}
NOT_IN_CI = {"clean", "coverage", "durations", "help", "release", "test-avx2", "test-long"}
TIERS = {"full", "long"}
# Module -> the package that has it, where the names differ.
PACKAGES = {
    "compressed_tensors": "compressed-tensors",
    "lance": "pylance",
    "pillow_heif": "pillow-heif",
    "silero_vad": "silero-vad",
}


def read(name):
    return (ROOT / name).read_text()


def targets_of(commands):
    """Returns the targets of all `make` commands among the lines that users type."""
    words = [shlex.split(line, comments=True) for line in commands if line.startswith("make ")]
    return {word for line in words for word in line[1:] if word[0] not in "-." and "=" not in word}


def blocks_of(name):
    """Returns the lines of a guide's code blocks."""
    found = re.findall(r"^```bash\n(.*?)^```", read(name), re.DOTALL | re.MULTILINE)
    return [line for block in found for line in block.splitlines()]


@pytest.fixture(scope="module")
def ci():
    """Returns the commands of .ci/run that make something."""
    lines = re.sub(r"^#.*", "", read(".ci/run").replace("\\\n", " "), flags=re.MULTILINE)
    return [line.strip() for line in re.findall(r"\bmake [^>|&#\n]*", lines)]


@pytest.fixture(scope="module")
def makefile():
    """Returns the targets that users type."""
    (line,) = re.findall(r"^\.PHONY: (.*)$", read("Makefile"), re.MULTILINE)
    return set(line.split())


def test_ci_types_what_the_guides_say(ci, makefile):
    """It installs nothing of its own; every target is one that README or CONTRIBUTING names."""
    lines = read(".ci/run").splitlines()
    assert {"set -euo pipefail", 'cd "$(dirname "$0")/.."'} <= set(lines)
    assert not [
        line for line in lines if re.search(r"\b(pip|python|pytest) ", line) and "#" not in line
    ]
    named = {*re.findall(r"make ([a-z-]+)", read("README.md") + read("CONTRIBUTING.md"))}
    assert targets_of(ci) <= makefile & named


@pytest.mark.parametrize("guide", ["README.md", "CONTRIBUTING.md"])
def test_ci_runs_the_commands_of_the_guides(ci, makefile, guide):
    wanted = targets_of(blocks_of(guide))
    assert wanted <= makefile
    assert {LARGER.get(target, target) for target in wanted - NOT_IN_CI} <= targets_of(ci)


def test_the_readme_tests_with_make():
    lines = blocks_of("README.md")
    assert "test" in targets_of(lines)
    assert not [line for line in lines if "-m pytest" in line]


def test_every_target_is_explained(makefile):
    explained = re.findall(r'@echo "make ([a-z0-9-]+) ', read("Makefile"))
    assert len(explained) == len(set(explained))
    assert {*explained} == makefile - {"help"}


def test_make_installs_what_tests_import():
    """The extra `dev` holds every package that a test looks for before it is skipped."""
    project = tomllib.loads(read("pyproject.toml"))["project"]
    extras = project["optional-dependencies"]
    assert '--editable ".[dev]"' in read("Makefile")
    wanted = set()
    for path in TESTS.rglob("*.py"):
        if path.parent.name != "gpu":
            found = re.findall(r'(?:importorskip|find_spec)\("([a-z_0-9]+)', path.read_text())
            wanted |= set(found) - {"mmdeploy_llm", "mmdeploy_llm_processors"}
    wanted = {PACKAGES.get(name, name) for name in wanted}
    installed, pending = set(), ["dev"]
    while pending:
        for requirement in extras[pending.pop()]:
            name, inner = re.match(r"([\w-]+)(?:\[(.*?)\])?", requirement).groups()
            installed.add(name)
            if name == project["name"]:
                pending += inner.split(",")
    assert wanted
    assert wanted <= installed


def marked_from_afar(text):
    """Returns the tiers that a conftest.py gives to tests elsewhere: a test says its own."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "add_marker":
            found |= TIERS & set(re.findall(r"\w+", ast.unparse(node)))
    return found


def test_a_test_says_its_own_tier():
    assert marked_from_afar("item.add_marker(pytest.mark.full)") == {"full"}
    assert marked_from_afar("if slow: item.add_marker('long')") == {"long"}
    for path in TESTS.rglob("conftest.py"):
        assert marked_from_afar(path.read_text()) == set(), path


def test_the_tiers_leave_no_test_out():
    """Each is a choice by markers alone, and together they are all tests."""
    found = dict(re.findall(r"^(test[\w-]*): .*\n.*-m \"?([\w ]+?)\"? \$", read("Makefile"), re.M))
    assert found == {
        "test": "not full and not long",
        "test-all": "not long",
        "test-long": "long",
    }
    options = tomllib.loads(read("pyproject.toml"))["tool"]["pytest"]["ini_options"]
    assert "--strict-markers" in options["addopts"]
    assert {line.partition(":")[0] for line in options["markers"]} >= TIERS


@pytest.mark.parametrize(
    ("path", "reason", "is_known"),
    [
        ("tests/gpu/test_equal.py", "Skipped: needs a CUDA device", True),
        ("tests/kernels/cpu/test_cores.py", "Skipped: this machine tells no NUMA nodes", True),
        ("mmdeploy_llm/testing/conformance.py", "Skipped: position i of a prompt is i", True),
        ("tests/system/test_tools.py", "Skipped: needs llguidance: the extra 'guided'", False),
        ("tests/kernels/cpu/test_build.py", "Skipped: no C++ compiler on this machine", False),
    ],
)
def test_ci_knows_why_a_test_may_be_skipped(load_file, path, reason, is_known):
    report = SimpleNamespace(nodeid="a test", longrepr=(path, 1, reason))
    reporter = SimpleNamespace(stats={"skipped": [report]})
    plugins = SimpleNamespace(get_plugin=lambda name: reporter)
    found = load_file("conftest.py").unknown_skips(SimpleNamespace(pluginmanager=plugins))
    assert found == ([] if is_known else [f"a test: {reason}"])
