"""`plugins new` writes a package that passes linter, type checker and tests unchanged."""

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mmdeploy_llm import ConfigError, __version__
from mmdeploy_llm.hooks import discovery
from mmdeploy_llm.scaffold import KINDS, write_package
from mmdeploy_llm.scaffold.package import package_names

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=KINDS)
def package(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return write_package(f"my-{request.param}", request.param, folder)


def test_every_file_that_it_names_is_written(package):
    written = {
        path.relative_to(package.folder).as_posix()
        for path in package.folder.rglob("*")
        if path.is_file()
    }
    assert written == set(package.files)
    assert {"pyproject.toml", "README.md", ".gitignore"} <= written


def test_nothing_is_left_of_the_template(package):
    for name in package.files:
        text = (package.folder / name).read_text()
        assert "$" not in name + text, name
        assert text.endswith("\n")
        assert "\t" not in text


def test_the_code_keeps_the_rules_of_this_repository(package):
    settings = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    run_ruff = [sys.executable, "-m", "ruff"]
    # The kit's test classes are configured by plain class attributes.
    rules = ["--ignore", "RUF012"]
    for command in (["check", *rules, *settings], ["format", "--check", *settings]):
        done = subprocess.run(
            [*run_ruff, *command, "."],
            cwd=package.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.long
def test_the_code_is_typed(package):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--config-file=",
            "--follow-imports=silent",
            "src",
        ],
        cwd=package.folder,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_the_project_file_names_module_and_versions(package):
    project = tomllib.loads((package.folder / "pyproject.toml").read_text())["project"]
    (entry,) = project["entry-points"][discovery.ENTRY_POINT_GROUP].items()
    assert entry[1] == f"{entry[0].replace('-', '_')}_llm"
    assert (package.folder / "src" / entry[1] / "__init__.py").is_file()
    requirement = project["dependencies"][0]
    from packaging.requirements import Requirement

    assert Requirement(requirement).name == "mmdeploy-llm"
    assert Requirement(requirement).specifier.contains(__version__, prereleases=True)
    assert not Requirement(requirement).specifier.contains("1.0")


def test_the_tests_are_short(package):
    (test,) = (package.folder / "tests").glob("test_*.py")
    tree = ast.parse(test.read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert all(ast.unparse(base).endswith("Conformance") for node in classes for base in node.bases)
    assert len(classes) == 2


def test_an_existing_folder_is_left_alone(tmp_path):
    (tmp_path / "acme-llm").mkdir()
    with pytest.raises(ConfigError, match=r"acme-llm.* exists; nothing is overwritten"):
        write_package("acme", "parser", tmp_path)
    assert list((tmp_path / "acme-llm").iterdir()) == []


def test_the_directory_is_made(tmp_path):
    assert write_package("acme", "parser", tmp_path / "a" / "b").folder.is_dir()


@pytest.mark.parametrize(
    ("name", "package", "module"),
    [
        ("acme", "acme-llm", "acme_llm"),
        ("Acme_Vision", "acme-vision-llm", "acme_vision_llm"),
        ("acme.v2", "acme-v2-llm", "acme_v2_llm"),
        ("acme-llm", "acme-llm", "acme_llm"),
        ("json", "json-llm", "json_llm"),
    ],
)
def test_names(name, package, module):
    names = package_names(name)
    assert (names["package"], names["module"]) == (package, module)
    assert names["name"] == package.removesuffix("-llm")
    assert names["title"].isidentifier()


@pytest.mark.parametrize(
    "name", ["", "2fast", "-a", "a-", "a b", "../up", "a/b", "é", "mmdeploy", "mmdeploy-llm", "a$b"]
)
def test_invalid_names(name, tmp_path):
    with pytest.raises(ConfigError):
        write_package(name, "parser", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_kind(tmp_path):
    with pytest.raises(ConfigError, match="no kind 'parsers'; did you mean 'parser'"):
        write_package("acme", "parsers", tmp_path)
