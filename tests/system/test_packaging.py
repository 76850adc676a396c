"""The wheel: everything that runs is in it, under the names it is imported by."""

import configparser
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "mmdeploy_llm": "mmdeploy_llm",
    "plugins": "mmdeploy_llm_plugins",
    "processors": "mmdeploy_llm_processors",
}
MIN_SETUPTOOLS = 77  # the first to read `license = "Apache-2.0"`
MAX_WHEEL_BYTES = 20 * 2**20


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this tree, built in a copy, so that the tree stays clean; no network."""
    found = metadata.version("setuptools")
    if int(found.split(".")[0]) < MIN_SETUPTOOLS:
        pytest.skip(f"setuptools {found} is installed, building needs {MIN_SETUPTOOLS}")
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def names(wheel):
    """The names of the files in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_every_module_is_in_it_under_its_import_name(names):
    for folder, package in FOLDERS.items():
        modules = {
            f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
            for path in (ROOT / folder).rglob("*.py")
        }
        assert modules <= names, sorted(modules - names)


def test_nothing_lands_under_a_name_of_its_own(names):
    allowed = {*FOLDERS.values(), "mmdeploy_llm-0.1.0.dist-info"}
    assert {name.split("/")[0] for name in names} == allowed


def test_data_files_are_in_it(names):
    data = {"mmdeploy_llm/py.typed", "mmdeploy_llm/batch/report.html"}
    bundled = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "mmdeploy_llm" / "bundled").rglob("*")
        if path.is_file()
    }
    templates = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "mmdeploy_llm" / "scaffold" / "templates").rglob("*.tmpl")
    }
    assert any(name.endswith("/.gitignore.tmpl") for name in templates)
    wanted = data | bundled | templates
    assert wanted <= names, sorted(wanted - names)


def test_the_bundled_model_is_whole(names):
    files = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
    missing = {f"mmdeploy_llm/bundled/shapes-vl/{file}" for file in files} - names
    assert not missing


def test_it_stays_small(wheel):
    assert wheel.stat().st_size < MAX_WHEEL_BYTES


def test_entry_points_and_program_are_declared(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        points = configparser.ConfigParser()
        points.optionxform = str
        points.read_string(archive.read(name).decode())
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert dict(points["console_scripts"]) == {"mmdeploy-llm": "mmdeploy_llm.cli:main"}
    assert dict(points["mmdeploy_llm"]) == declared["entry-points"]["mmdeploy_llm"]


def test_every_entry_point_names_a_module_of_the_wheel(names):
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for module in declared["entry-points"]["mmdeploy_llm"].values():
        assert f"{module.replace('.', '/')}/__init__.py" in names


def test_version_and_license(wheel):
    from mmdeploy_llm import __version__

    assert f"-{__version__}-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"mmdeploy_llm-{__version__}.dist-info/METADATA").decode()
    assert "License-Expression: Apache-2.0" in text
    assert "Requires-Dist: torch<2.14,>=2.11" in text
