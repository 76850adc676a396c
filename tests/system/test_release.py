"""A release is made in a clone: whatever stops it, the tree stays as it was."""

import datetime
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = {
    "pyproject.toml": '[project]\nname = "a"\nversion = "0.1.0"\n',
    "mmdeploy_llm/__init__.py": '__version__ = "0.1.0"\n',
    "CHANGELOG.md": "# Changes\n\n## [Unreleased]\n\n- New.\n\n## [0.1.0] - 2026-01-01\n\n- Old.\n",
    ".gitignore": "dist/\n",
}
# What git asks of gpg for a signature.
SIGNS = """#!/bin/sh
cat > /dev/null
printf '\\n[GNUPG:] SIG_CREATED D 1 8 00 0 F\\n' >&2
printf -- '-----BEGIN PGP SIGNATURE-----\\n\\nabc\\n-----END PGP SIGNATURE-----\\n'
"""


@pytest.fixture
def release():
    """The module, which is no package's."""
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def git(folder, *words):
    command = ["git", "-C", folder, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def begin(folder):
    """Makes a repository of the folder's files."""
    git(folder, "init", "--quiet", "--initial-branch", "main")
    for key, value in (("user.name", "A"), ("user.email", "a@example.org")):
        git(folder, "config", key, value)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--no-gpg-sign", "-m", "Begin")
    return folder


def program(folder, text):
    path = folder / "gpg"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def repository(tmp_path):
    """A small repository whose tags a program can sign."""
    folder = tmp_path / "repository"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    begin(folder)
    git(folder, "config", "gpg.program", program(tmp_path, SIGNS))
    git(folder, "config", "user.signingkey", "A")
    return folder


@pytest.fixture
def quick(release, monkeypatch):
    """The release with a build that takes no time."""

    def build(tree, dist, *, has_kernels):
        dist.mkdir()
        version = release.VERSION.search((tree / "pyproject.toml").read_text())[2]
        (dist / f"mmdeploy_llm-{version}.tar.gz").write_bytes(b"sdist")
        return sorted(dist.iterdir())

    monkeypatch.setattr(release, "build", build)
    monkeypatch.setattr(release, "check_files", lambda files, version: None)
    monkeypatch.setattr(release, "write_sbom", lambda path, version, tree: path.write_text("{}"))
    return release


def make(release, repository, version="0.2.0", *, is_dry=False):
    out = repository / "dist"
    return release.release(version, repository, out, is_dry=is_dry, has_kernels=False)


def test_a_release_is_a_commit_a_signed_tag_and_files(quick, repository):
    names = [path.name for path in make(quick, repository)]
    assert names == ["SHA256SUMS", "mmdeploy_llm-0.2.0.cdx.json", "mmdeploy_llm-0.2.0.tar.gz"]
    assert git(repository, "log", "-1", "--format=%s") == "Release 0.2.0"
    assert "BEGIN PGP SIGNATURE" in git(repository, "cat-file", "tag", "v0.2.0")
    assert git(repository, "status", "--porcelain") == ""
    assert 'version = "0.2.0"' in (repository / "pyproject.toml").read_text()
    assert (repository / "mmdeploy_llm/__init__.py").read_text() == '__version__ = "0.2.0"\n'
    today = datetime.datetime.now(datetime.UTC).date()
    changes = (repository / "CHANGELOG.md").read_text()
    assert f"## [Unreleased]\n\n## [0.2.0] - {today}\n\n- New.\n\n## [0.1.0]" in changes
    for line in (repository / "dist" / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        data = (repository / "dist" / name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == digest


def test_a_dry_run_leaves_the_tree(quick, repository, tmp_path):
    git(repository, "config", "gpg.program", program(tmp_path, "#!/bin/sh\nexit 1\n"))
    before = git(repository, "rev-parse", "HEAD")
    assert len(make(quick, repository, is_dry=True)) == 3
    assert git(repository, "rev-parse", "HEAD") == before
    assert (git(repository, "status", "--porcelain"), git(repository, "tag")) == ("", "")


def change(name, text):
    return lambda folder: (folder / name).write_text(text)


def commit_empty(folder):
    change("CHANGELOG.md", FILES["CHANGELOG.md"].replace("- New.\n", ""))(folder)
    git(folder, "commit", "--quiet", "--no-gpg-sign", "-am", "Nothing new")


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("version", "before", "problem"),
    [
        ("next", None, "is no version"),
        ("", None, "is no version"),
        ("v0.2.0", None, "is not written as it is published: 0.2.0"),
        ("0.2.0+mine", None, "is not written as it is published"),
        ("0.0.9", None, "is older than 0.1.0"),
        ("0.2.0", change("new.txt", "x"), "not committed"),
        ("0.2.0", lambda folder: git(folder, "tag", "v0.2.0"), "is there already"),
        ("0.2.0", commit_empty, "nothing under"),
        ("0.2.0", lambda it: git(it, "config", "gpg.program", "false"), "git cannot sign the tag"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_stands_in_the_way(quick, repository, version, before, problem):
    if before is not None:
        before(repository)
    head, status = git(repository, "rev-parse", "HEAD"), git(repository, "status", "--porcelain")
    with pytest.raises(SystemExit, match=problem):
        make(quick, repository, version)
    assert git(repository, "rev-parse", "HEAD") == head
    assert git(repository, "status", "--porcelain") == status
    assert not (repository / "dist").exists()


def test_a_build_that_fails_leaves_the_tree(quick, repository, monkeypatch):
    def build(tree, dist, *, has_kernels):
        raise quick.ReleaseError("no compiler")

    monkeypatch.setattr(quick, "build", build)
    head = git(repository, "rev-parse", "HEAD")
    with pytest.raises(SystemExit, match="no compiler"):
        make(quick, repository)
    assert git(repository, "rev-parse", "HEAD") == head
    assert (git(repository, "status", "--porcelain"), git(repository, "tag")) == ("", "")


def test_an_sdist_that_lacks_a_file_is_noticed(release, tmp_path):
    paths = [tmp_path / "one.whl", tmp_path / "other.whl"]
    for path, names in zip(paths, (("a.py", "a/RECORD"), ("a.py", "a.json")), strict=True):
        with zipfile.ZipFile(path, "w") as archive:
            for name in names:
                archive.writestr(name, name)
    with pytest.raises(SystemExit, match=r"the sdist does not hold what the tree does: a\.json"):
        release.compare_wheels(*paths)
    release.compare_wheels(paths[0], paths[0])


def test_files_of_another_version_or_for_this_machine_only(release, monkeypatch):
    monkeypatch.setattr(release, "run", lambda *words: "")
    good = [Path(f"mmdeploy_llm-1.0-py3-none-{name}.whl") for name in ("any", "manylinux_2_28_x")]
    release.check_files(good, "1.0")
    for name in ("mmdeploy_llm-1.1-py3-none-any.whl", "mmdeploy_llm-1.0-py3-none-linux_x86_64.whl"):
        with pytest.raises(SystemExit, match="is no file of version"):
            release.check_files([Path(name)], "1.0")


def test_versions_agree(release):
    found = {
        release.VERSION.search((ROOT / name).read_text("utf-8"))[2]
        for name in release.VERSION_FILES
    }
    assert len(found) == 1


@pytest.mark.long
def test_the_command_on_a_copy_of_this_repository(tmp_path):
    """Builds what everybody can install, checks its metadata, and tells what it needs."""
    for name in ("build", "twine", "cyclonedx_py"):
        assert importlib.util.find_spec(name) is not None, f"the extra `dev` has no {name}"
    folder = tmp_path / "copy"
    skipped = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("mmdeploy_llm", "plugins", "processors", ".ci"):
        shutil.copytree(ROOT / name, folder / name, ignore=skipped)
    for name in (
        "pyproject.toml",
        "hatch_build.py",
        "README.md",
        "LICENSE",
        "NOTICE",
        "CHANGELOG.md",
    ):
        shutil.copy(ROOT / name, folder)
    (folder / ".gitignore").write_text("dist/\n__pycache__/\n")
    begin(folder)
    command = [sys.executable, folder / ".ci" / "release.py", "9.8.7", "--dry-run", "--pure"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ}, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "nothing was committed or tagged; nothing was uploaded" in done.stdout
    assert git(folder, "status", "--porcelain") == ""
    dist = folder / "dist"
    with tarfile.open(dist / "mmdeploy_llm-9.8.7.tar.gz") as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"hatch_build.py", "mmdeploy_llm/kernels/cpp/layers/kernels.cpp", "LICENSE"} <= inside
    with zipfile.ZipFile(dist / "mmdeploy_llm-9.8.7-py3-none-any.whl") as archive:
        assert b'__version__ = "9.8.7"' in archive.read("mmdeploy_llm/__init__.py")
    bill = json.loads((dist / "mmdeploy_llm-9.8.7.cdx.json").read_text("utf-8"))
    assert bill["metadata"]["component"]["version"] == "9.8.7"
    found = {each["name"]: each["version"] for each in bill["components"]}
    assert {"torch", "transformers", "pillow", "numpy", "huggingface_hub"} <= set(found)
    assert not {"pytest", "ray", "twine", "mypy", "mmdeploy-llm"} & set(found)
