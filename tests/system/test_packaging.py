"""The wheel: everything that runs is in it, under the names it is imported by."""

import configparser
import os
import platform
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

from mmdeploy_llm.kernels.cpu import prebuilt
from mmdeploy_llm.kernels.cpu.build import levels_of
from tests.tree import HOMES, ROOT, shipped

pytestmark = pytest.mark.full

MAX_WHEEL_BYTES = 20 * 2**20
# Most of a library are products: of rows in two types by weights of ten kinds, each for blocks of
# rows of several sizes.
MAX_LIBRARY_BYTES = 13 * 2**17
PLATFORMS = set(prebuilt.PLATFORMS.values())
PLATFORM_HERE = prebuilt.PLATFORMS.get((sys.platform, platform.machine()))


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of this tree, so that building leaves the tree clean."""
    tree = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("mmdeploy_llm", "plugins", "processors"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, tree)
    return tree


def build_wheel(tree, out, **variables):
    """Builds without network."""
    code = f"from hatchling import build; build.build_wheel({str(out)!r})"
    command, environment = [sys.executable, "-c", code], {**os.environ, **variables}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory):
    """The wheel without compiled kernels."""
    return build_wheel(tree, tmp_path_factory.mktemp("wheel"), MMDEPLOY_LLM_PURE="1")


@pytest.fixture(scope="module")
def names(wheel):
    """The names of the files in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_every_module_is_in_it_under_its_import_name(names):
    modules = set(shipped())
    assert len(modules) > 1000
    assert modules <= names, sorted(modules - names)


def test_nothing_lands_under_a_name_of_its_own(names):
    allowed = {*HOMES, "mmdeploy_llm-0.1.0.dist-info"}
    assert {name.split("/")[0] for name in names} == allowed


def test_data_files_are_in_it(names):
    others = {name for name in shipped("*") if not name.endswith((".py", ".pyc"))}
    templates = {name for name in others if name.endswith(".tmpl")}
    assert any(name.endswith("/.gitignore.tmpl") for name in templates)
    assert {"mmdeploy_llm/batch/report/report.html", "mmdeploy_llm_plugins/py.typed"} <= others
    assert others <= names, sorted(others - names)


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


LOAD = "from mmdeploy_llm.kernels import cpu; cpu.load()"
INSTALLED = ROOT / "tests" / "kernels" / "cpu" / "installed.py"
# Loads a library as an engine does, with the OpenMP runtime first, and calls a function of it.
LOADER = """
#include <dlfcn.h>
#include <cstdio>
int main(int, char** words) {
    if (!dlopen("libgomp.so.1", RTLD_NOW | RTLD_GLOBAL)) return 1;
    void* library = dlopen(words[1], RTLD_NOW);
    if (!library) return std::printf("%s\\n", dlerror()), 1;
    auto size = reinterpret_cast<int (*)()>(dlsym(library, "mm_vector_bytes"));
    return !size || size() != 16;
}
"""
# Each level on a processor that has no more than it needs, where the emulator knows one.
ARM = {
    "portable": "cortex-a53",
    "neon_dot": "neoverse-n1",
    "neon_i8mm": "max,sve=off",
    "neon_bf16": "max,sve=off",
}


def test_a_pure_wheel_has_no_compiled_kernels(wheel, names):
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in names if name.endswith(".so")]


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        (("linux", "x86_64"), "manylinux_2_28_x86_64"),
        (("linux", "aarch64"), "manylinux_2_28_aarch64"),
        (("darwin", "arm64"), "macosx_11_0_arm64"),
        (("darwin", "x86_64"), None),
        (("win32", "AMD64"), None),
        (("linux", "riscv64"), None),
    ],
    ids=str,
)
def test_the_platforms_of_wheels_with_kernels(tmp_path, monkeypatch, target, wanted):
    monkeypatch.setattr(prebuilt, "_target", lambda: target)
    monkeypatch.setattr(prebuilt, "compile_level", lambda level, path: path.write_bytes(b""))
    assert prebuilt.can_prebuild() is (wanted is not None)
    if wanted is not None:
        assert prebuilt.prebuild(tmp_path / "prebuilt") == wanted
        levels = {path.name.partition("-")[0] for path in (tmp_path / "prebuilt").iterdir()}
        assert levels == {level.value for level in levels_of(target[1])}


def test_a_wheel_that_must_have_kernels_and_has_none_is_an_error(tree, tmp_path):
    code = f"from hatchling import build; build.build_wheel({str(tmp_path)!r})"
    environment = {**os.environ, "MMDEPLOY_LLM_KERNELS": "1", "PATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "no kernels for the wheel: no C++ compiler" in done.stderr
    assert not list(tmp_path.glob("*.whl"))


def test_the_documented_build_makes_these_wheels():
    """The configuration of cibuildwheel names the platforms of prebuilt.py, and a wheel without
    kernels is an error there."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    found = {name.partition("-")[2] for name in build["build"].split()}
    wanted = {name.replace("_2_28", "").replace("_11_0", "") for name in PLATFORMS}
    assert found == wanted
    images = {build[f"manylinux-{machine}-image"] for machine in ("x86_64", "aarch64")}
    assert images == {"manylinux_2_28"}
    assert build["environment"] == {"MMDEPLOY_LLM_KERNELS": "1"}
    assert build["test-command"] == "python {project}/" + INSTALLED.relative_to(ROOT).as_posix()


@pytest.mark.long
@pytest.mark.skipif(not prebuilt.can_prebuild(), reason="prebuilt kernels are for Linux and macOS")
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_a_wheel_with_kernels_needs_no_compiler(tree, tmp_path):
    """Builds for all levels, also those that this processor does not execute, then computes with
    each that it does in a program that finds no compiler and no cache."""
    path = build_wheel(tree, tmp_path / "wheel", MMDEPLOY_LLM_KERNELS="1")
    assert path.name.endswith(f"-py3-none-{PLATFORM_HERE}.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "installed")
    libraries = list((tmp_path / "installed/mmdeploy_llm/kernels/cpu/prebuilt").iterdir())
    assert len(libraries) == len(levels_of(platform.machine()))
    assert sum(file.stat().st_size for file in libraries) < MAX_LIBRARY_BYTES * len(libraries)
    (tmp_path / "file").touch()
    variables = {"PATH": "", "HOME": str(tmp_path / "file"), "OMP_NUM_THREADS": "1"}
    variables["PYTHONPATH"] = str(tmp_path / "installed")
    command = [sys.executable, str(INSTALLED)]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "installed"))
    (tmp_path / "installed/mmdeploy_llm/kernels/cpp/layers/runtime.h").write_text(
        "// other sources"
    )
    command = [sys.executable, "-c", LOAD]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert "no C++ compiler" in done.stderr


@pytest.mark.long
def test_the_libraries_of_a_wheel_for_arm_are_loaded(tmp_path, monkeypatch):
    """Compiles those of a wheel for aarch64 with a cross compiler; loads each in an emulator."""
    compiler, emulator = "aarch64-linux-gnu-g++", shutil.which("qemu-aarch64")
    if emulator is None or shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler} and qemu-user")
    monkeypatch.setattr(prebuilt, "_target", lambda: ("linux", "aarch64"))
    monkeypatch.setattr(sys.modules["mmdeploy_llm.kernels.cpu.build"], "COMPILERS", (compiler,))
    assert prebuilt.prebuild(tmp_path / "prebuilt") == "manylinux_2_28_aarch64"
    (tmp_path / "loader.cpp").write_text(LOADER)
    command = [compiler, "loader.cpp", "-ldl", "-lgomp", "-o", "loader"]
    subprocess.run(command, cwd=tmp_path, check=True)
    for path in (tmp_path / "prebuilt").iterdir():
        processor = ARM[path.name.partition("-")[0]]
        command = [emulator, "-L", "/usr/aarch64-linux-gnu", "-cpu", processor, "./loader", path]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, (path.name, done.stdout, done.stderr)
