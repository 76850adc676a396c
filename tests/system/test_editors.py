"""Editors and type checkers find in users' scripts the lines that are wrong and no others,
with the package installed from its tree and from a wheel."""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.system.test_packaging import tree, wheel  # noqa: F401

pytestmark = pytest.mark.full

SCRIPTS = Path(__file__).parent / "typed"
MYPY = """\
[mypy]
strict = true
[mypy-torch.*,transformers.*,tqdm.*,PIL.*]
ignore_missing_imports = true
follow_imports = skip
"""


@pytest.fixture(scope="module", params=["editable", pytest.param("wheel", marks=pytest.mark.long)])
def python(request, tmp_path_factory):
    """The interpreter of an environment that has the package, installed in one of two ways."""
    if request.param == "editable":
        return sys.executable
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False, symlinks=True)
    (packages,) = home.glob("lib/python*/site-packages")
    with zipfile.ZipFile(request.getfixturevalue("wheel")) as archive:
        archive.extractall(packages)
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))  # torch and the like
    return str(home / "bin/python")


@pytest.fixture
def folder(tmp_path):
    """The scripts, in a folder that knows nothing of this repository."""
    return Path(shutil.copytree(SCRIPTS, tmp_path / "scripts"))


def wrong_lines():
    lines = [
        (path.name, number)
        for path in SCRIPTS.glob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if line.endswith("# wrong")
    ]
    assert len(lines) > 15
    return sorted(lines)


def test_pyright_finds_the_wrong_lines(python, folder):
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", python, "--outputjson", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    found = [
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1)
        for each in json.loads(done.stdout)["generalDiagnostics"]
    ]
    assert sorted(set(found)) == wrong_lines(), done.stdout


def test_mypy_finds_the_wrong_lines(python, folder):
    (folder / "mypy.ini").write_text(MYPY)
    command = [sys.executable, "-m", "mypy", "--python-executable", python, "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    found = re.findall(r"^(\w+\.py):(\d+): error", done.stdout, re.MULTILINE)
    assert sorted({(name, int(line)) for name, line in found}) == wrong_lines(), done.stdout
