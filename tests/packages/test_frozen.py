"""The packages of frozen/, as strangers wrote them once, pass their own tests unchanged."""

import hashlib
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest

from mmdeploy_llm.testing.plugins import fresh

FROZEN = Path(__file__).with_name("frozen")
DIGESTS = dict(line.split()[::-1] for line in (FROZEN / "frozen.sha256").read_text().splitlines())
NAMES = sorted(path.parent.name for path in FROZEN.glob("*/pyproject.toml"))
PYTEST = """
import sys, pytest
from mmdeploy_llm.testing.plugins import fresh
fresh.changes_of = lambda modules: {found}
sys.exit(pytest.main(sys.argv[1:]))
"""
WORDS = ("-q", "-rxs", "-n", "0", "-p", "no:cacheprovider")


def digest_of(folder):
    """Returns the SHA-256 of the names and contents of a package's files."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            found.update(f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes())
    return found.hexdigest()


def test_nobody_has_edited_them():
    found = {name: digest_of(FROZEN / name) for name in NAMES}
    assert found == DIGESTS, "they are never edited, see frozen/README.md"


def installed(name, folder):
    """Writes what pip writes beside a package's modules; returns the path of all."""
    project = tomllib.loads((FROZEN / name / "pyproject.toml").read_text())["project"]
    info = folder / f"{project['name'].replace('-', '_')}-0.1.0.dist-info"
    info.mkdir()
    about = [f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}"]
    about += [f"Requires-Dist: {line}" for line in project["dependencies"]]
    (info / "METADATA").write_text("\n".join(about) + "\n")
    ((entry, module),) = project["entry-points"]["mmdeploy_llm"].items()
    (info / "entry_points.txt").write_text(f"[mmdeploy_llm]\n{entry} = {module}\n")
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join(map(str, filter(None, (FROZEN / name / "src", folder, inherited))))


@pytest.fixture(scope="module")
def changes():
    """Finds what importing the packages changes, in one process for all: it imports torch, which
    takes seconds."""
    modules = [f"{name.replace('-', '_')}_llm" for name in NAMES]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*(str(FROZEN / name / "src") for name in NAMES), *sys.path])
        return fresh.changes_of(modules)


@pytest.mark.full  # seconds: a process that imports what the package imports
@pytest.mark.parametrize("name", NAMES)
def test_a_package_of_a_stranger_passes_its_own_tests(name, tmp_path, run_program, changes):
    env = {"PYTHONPATH": installed(name, tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = run_program(PYTEST.format(found=changes), *WORDS, cwd=FROZEN / name, env=env)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 10
    if name == "phi-long":
        assert "turned_dim is now called rotary_dim; mmdeploy-llm 0.3 removes" in done.stdout
