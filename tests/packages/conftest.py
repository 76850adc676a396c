"""A fresh environment for packages, discarded with all that is installed in it."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

collect_ignore = ["frozen"]  # test_frozen.py runs the tests of these, each in its own process
ROOT = Path(__file__).parents[2]
MAX_SECONDS = 3600  # ends what hangs: the checks of all plugins take many minutes under load
# Makes this interpreter's packages visible in the environment, so that it needs no network.
PATHS = """import site; site.addsitedir({folder!r})
"""
SCRIPTS = {
    "pip": "-m pip",
    "pytest": "-m pytest -p no:cacheprovider",
    "mmdeploy-llm": '-c "from mmdeploy_llm.cli import main; main()"',
}
OFFLINE = "--no-index --no-deps --no-build-isolation --quiet --disable-pip-version-check"


class Environment:
    """A virtual environment that finds this interpreter's packages after its own."""

    def __init__(self, folder):
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.python = folder / "bin" / "python"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.site = folder / "lib" / version / "site-packages"
        text = PATHS.format(folder=sysconfig.get_paths()["purelib"])
        (self.site / "outer.pth").write_text(text)
        for name, words in SCRIPTS.items():
            self._script(name, words)

    def _script(self, name, words):
        """Writes a command of the environment, as pip would."""
        last = f'case "$1" in install) shift; set -- install {OFFLINE} "$@";; esac\n'
        text = f'#!/bin/sh\n{last if name == "pip" else ""}exec {self.python} {words} "$@"\n'
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def run(self, command, cwd=None, ok=True):
        """Runs a shell command as in the activated environment."""
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["sh", "-ec", command],
            cwd=cwd or self.folder,
            env={**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=MAX_SECONDS,
            check=False,
        )
        if ok:
            assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
        return done

    def program(self, text, ok=True):
        """Runs a Python program; returns its last printed line, which is JSON."""
        file = self.folder / "program.py"
        file.write_text(text)
        done = self.run(f"{self.python} {file}", ok=ok)
        return json.loads(done.stdout.splitlines()[-1]) if ok else done

    def install(self, folder):
        """Installs a package from a copy of its folder, so that the folder stays clean."""
        copy = self.folder / "copies" / folder.name
        skipped = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
        shutil.copytree(folder, copy, ignore=skipped)
        self.run(f"pip install {copy}")
        return copy


@pytest.fixture(scope="session")
def new_environment(tmp_path_factory):
    """Returns a function that makes an Environment."""
    if os.name != "posix":
        pytest.skip("the scripts of the environment are for sh")
    return lambda: Environment(tmp_path_factory.mktemp("environment"))
