"""Leaves out dear groups of tests whose code has not changed. Used with `pytest -p tests.changed`.

    base commit --git diff--> files that differ --> groups that none of them concerns --> left out

A group runs when one of its test files differs, or a file of the code that it tests, or one that
such a file imports; all groups run when a file differs that any test may use, and when no base is
known. The base is what the environment's BASE names; otherwise it is where the branch left
origin's main branch. A clone of that branch itself has no base. The summary says what was left out.
"""

import ast
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.tree import ROOT, shipped

# What any test may use. The rest of the root's files concerns no group.
SHARED = re.compile(
    r"pyproject\.toml|Makefile|hatch_build\.py|\.ci/|tests/(?!test_)\w+\.py|tests/(\w+/)?conftest\.py"
)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Tests of one name: how to know them, and the code that they test."""

    name: str
    has: Callable[[Any], bool]
    code: tuple[str, ...]


def is_below(*folders):
    """Returns a function that says whether an item lies in one of the folders."""
    return lambda item: item.nodeid.startswith(folders)


def is_of_another_level(item):
    """Whether an item uses kernels of another level than the best of this machine."""
    from mmdeploy_llm.kernels.cpu import Level, cpu_levels

    used = getattr(item, "callspec", None)
    values = used.params.values() if used else ()
    return any(isinstance(value, Level) and value is not cpu_levels()[0] for value in values)


GROUPS = (
    Group(
        name="emulated CUDA",
        has=lambda item: is_below("tests/kernels/cuda/")(item) or "triton" in item.keywords,
        code=("mmdeploy_llm/kernels/cuda/", "mmdeploy_llm/layers/attention/"),
    ),
    Group(
        name="other levels of the CPU",
        has=lambda item: is_below("tests/kernels/cpu/")(item) and is_of_another_level(item),
        code=("mmdeploy_llm/kernels/cpu/", "mmdeploy_llm/kernels/cpp/"),
    ),
    Group(
        name="census",
        has=is_below("tests/plugins/transformers_any/test_census.py"),
        code=("plugins/mmdeploy_llm_plugins/transformers_any/",),
    ),
    Group(name="Ray", has=is_below("tests/client/ray/"), code=("mmdeploy_llm/client/ray/",)),
    Group(
        name="Lance",
        has=lambda item: bool(re.search(r"(?<![a-z])lance", item.nodeid.lower())),
        code=(
            "mmdeploy_llm/data/rows/",
            "mmdeploy_llm/data/outputs/",
            "plugins/mmdeploy_llm_plugins/outputs/",
        ),
    ),
)


def imported(files, texts):
    """Returns the files that some files import. texts: of all shipped files, by their paths."""
    places = {
        path.removeprefix("plugins/")
        .removeprefix("processors/")
        .removesuffix(".py")
        .removesuffix("/__init__")
        .replace("/", "."): path
        for path in texts
    }
    names = {path: name for name, path in places.items()}
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(texts[file])):
            found |= {places[name] for name in _modules(node, names[file], file) if name in places}
    return found


def _modules(node, own, file):
    """Yields the modules that an import may mean: `from a import b` means a.b, or a name in a."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        parts = own.split(".") if file.endswith("/__init__.py") else own.split(".")[:-1]
        above = parts[: len(parts) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def concerned(group, tests, files, texts):
    """Whether a group must run. tests: its test files; files: those that differ; see `imported`."""
    own = {path for path in texts if path.startswith(group.code)}
    watched = tests | own | imported(own, texts)
    folders = tuple(f"{os.path.dirname(test)}/" for test in tests if "/conftest" not in test)
    is_near = [f.startswith((*group.code, *folders)) for f in files if not f.endswith(".md")]
    return bool(watched & files) or any(is_near)


def git(*words):
    """Returns what git prints, None where it fails."""
    done = subprocess.run(["git", *words], capture_output=True, text=True, cwd=ROOT)
    return done.stdout.strip() if done.returncode == 0 else None


def base_commit(environment=os.environ, git=git):
    """Returns the commit to compare with, None where none is known."""
    if environment.get("BASE"):
        return git("merge-base", "HEAD", environment["BASE"])
    base = git("merge-base", "HEAD", "origin/HEAD")
    return None if base is None or base == git("rev-parse", "HEAD") else base


def changed_files(base, git=git):
    """Returns the files that differ from a commit, None where git cannot tell."""
    names = git("diff", "--name-only", "--no-renames", base) if base else None
    if names is None:
        return None
    new = git("ls-files", "--others", "--exclude-standard") or ""
    return {name for name in (*names.splitlines(), *new.splitlines()) if name}


def chosen(items, files, texts):
    """Returns the items to run and {name of a group: tests left out}."""
    if files is None or any(SHARED.match(name) for name in files):
        return items, {}
    left_out, kept = Counter(), items
    for group in GROUPS:
        own = [item for item in kept if group.has(item)]
        tests = {item.nodeid.partition("::")[0] for item in own}
        if own and not concerned(group, tests, files, texts):
            left_out[group.name] = len(own)
            kept = [item for item in kept if not group.has(item)]
    return kept, dict(left_out)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    texts = {
        path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in shipped().values()
    }
    kept, left_out = chosen(items, changed_files(base_commit()), texts)
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept
    getattr(config, "workeroutput", {})["left_out"] = config.left_out = left_out


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    node.config.left_out = getattr(node, "workeroutput", {}).get("left_out", {})


def pytest_terminal_summary(terminalreporter, config):
    base = base_commit()
    if base is None:
        terminalreporter.write_line("all groups of tests ran: no commit to compare with is known")
    for name, num in getattr(config, "left_out", {}).items():
        terminalreporter.write_line(
            f"left out: {num} tests of {name}; nothing that they use differs from {base[:12]}, "
            "make test-all runs them"
        )
