"""Makes a release: `make release VERSION=0.2.0`, or with DRY_RUN=1 all but the commit and the tag.

    HEAD --clone--> version, changelog, commit --build--> sdist, wheels, SBOM --checks--> dist/
                                               `--only then, unless dry--> this branch, signed tag

The work is done in a clone, so that a release that fails leaves the tree as it was. Nothing is
uploaded. docs/releasing.md says what comes before and after.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).parents[1]
PACKAGE = "mmdeploy-llm"
VERSION = re.compile(r'^((?:__)?version(?:__)? = ")([^"]+)(")$', re.MULTILINE)
VERSION_FILES = ("pyproject.toml", "mmdeploy_llm/__init__.py")
UNRELEASED = "## [Unreleased]\n"
# A wheel of a source tree and one of its sdist name the files in another order.
UNORDERED = ("RECORD",)


class ReleaseError(SystemExit):
    """Raised for what stands in the way of a release; the text says what to do."""


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    """Returns what a command prints. Raises ReleaseError with its errors."""
    words = [str(word) for word in command]
    environment = {**os.environ, **variables}
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr + done.stdout).strip()[-3000:]
        raise ReleaseError(f"{' '.join(words)} failed:\n{said}")
    return done.stdout.strip()


def git(*words: str | Path, cwd: Path = ROOT) -> str:
    return run("git", *words, cwd=cwd)


def check_before(version: str, root: Path) -> None:
    """Raises ReleaseError unless this tree can become that version."""
    try:
        new = Version(version)
    except InvalidVersion:
        raise ReleaseError(
            f"{version!r} is no version; give one such as 0.2.0 or 0.2.0rc1"
        ) from None
    if str(new) != version or new.local:
        raise ReleaseError(f"{version!r} is not written as it is published: {new.public}")
    now = VERSION.search((root / VERSION_FILES[0]).read_text("utf-8"))
    assert now is not None, f"{VERSION_FILES[0]} has no version"
    if new < Version(now[2]):
        raise ReleaseError(f"{version} is older than {now[2]}, which {VERSION_FILES[0]} has")
    if git("status", "--porcelain", cwd=root):
        raise ReleaseError("the tree has changes that are not committed; commit or remove them")
    if git("tag", "--list", f"v{version}", cwd=root):
        raise ReleaseError(f"the tag v{version} is there already; give another version")
    changes(root)


def check_key(root: Path) -> None:
    """Raises ReleaseError when git cannot sign: asks for a signature on an object that nothing
    names."""
    try:
        git("commit-tree", "-S", "-m", "can this be signed?", "HEAD^{tree}", cwd=root)
    except ReleaseError as error:
        raise ReleaseError(
            "git cannot sign the tag; name a key: git config user.signingkey KEY (with an SSH key "
            f"also gpg.format ssh). Or look first with DRY_RUN=1.\n{error}"
        ) from None


def changes(root: Path) -> str:
    """Returns the changes that the changelog has for the next version. Raises ReleaseError when
    there are none."""
    text = (root / "CHANGELOG.md").read_text("utf-8")
    _, found, rest = text.partition(UNRELEASED)
    body = re.split(r"^## \[", rest, maxsplit=1, flags=re.MULTILINE)[0].strip()
    if not found or not body:
        raise ReleaseError("CHANGELOG.md has nothing under [Unreleased]: say there what is new")
    return body


def write_version(version: str, tree: Path, today: datetime.date) -> None:
    """Writes the version where it stands, and heads the changes with it."""
    for name in VERSION_FILES:
        path = tree / name
        text, count = VERSION.subn(rf"\g<1>{version}\g<3>", path.read_text("utf-8"))
        if count != 1:
            raise ReleaseError(f"{name} has {count} lines with a version, one is expected")
        path.write_text(text, "utf-8")
    path = tree / "CHANGELOG.md"
    heading = f"{UNRELEASED}\n## [{version}] - {today.isoformat()}\n"
    path.write_text(path.read_text("utf-8").replace(UNRELEASED, heading, 1), "utf-8")


def build(tree: Path, dist: Path, *, has_kernels: bool) -> list[Path]:
    """Builds the sdist, of it the pure wheel and, where this machine can, one with kernels."""
    backend = [sys.executable, "-m", "build", "--no-isolation", "--outdir"]
    epoch = git("log", "-1", "--format=%ct", cwd=tree)  # the same commit gives the same files
    pure = {"MMDEPLOY_LLM_PURE": "1", "SOURCE_DATE_EPOCH": epoch}
    run(*backend, dist, tree, cwd=tree, **pure)  # the wheel is that of the unpacked sdist
    with tempfile.TemporaryDirectory() as own:
        run(*backend, own, "--wheel", tree, cwd=tree, **pure)
        compare_wheels(*Path(own).glob("*.whl"), *dist.glob("*.whl"))
    if has_kernels:
        forced = {"MMDEPLOY_LLM_KERNELS": "1", "SOURCE_DATE_EPOCH": epoch}
        run(*backend, dist, "--wheel", tree, cwd=tree, **forced)
    return sorted(dist.iterdir())


def compare_wheels(one: Path, other: Path) -> None:
    """Raises ReleaseError unless two wheels hold the same files."""
    found = []
    for path in (one, other):
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if not name.endswith(UNORDERED)]
            found.append({name: hashlib.sha256(archive.read(name)).hexdigest() for name in names})
    if found[0] != found[1]:
        names = sorted(name for name, _ in found[0].items() ^ found[1].items())
        raise ReleaseError(f"the sdist does not hold what the tree does: {', '.join(names[:9])}")


def check_files(files: list[Path], version: str) -> None:
    """Raises ReleaseError unless the metadata can be published and all files are of the version."""
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    for path in files:
        if not path.name.startswith(f"mmdeploy_llm-{version}") or "linux_" in path.name.replace(
            "manylinux_", ""
        ):
            raise ReleaseError(f"{path.name} is no file of version {version} for everybody")


def needed(name: str) -> set[str]:
    """Returns the packages that an installed one needs on this machine, without extras."""
    todo, found = [name], set()
    while todo:
        try:
            lines = metadata.requires(todo.pop()) or ()
        except metadata.PackageNotFoundError:
            continue
        wanted = [Requirement(line) for line in lines]
        names = {
            canonicalize_name(each.name)
            for each in wanted
            if each.marker is None or each.marker.evaluate({"extra": ""})
        }
        todo += names - found
        found |= names
    return found


def write_sbom(path: Path, version: str, tree: Path) -> None:
    """Writes the packages that this one was built and tested with, as CycloneDX: those that a user
    of no extra gets."""
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible"]
    command += ["--mc-type", "library", "--pyproject", tree / "pyproject.toml", sys.executable]
    bill = json.loads(run(*command))
    wanted = needed(PACKAGE)
    bill["components"] = [
        each for each in bill["components"] if canonicalize_name(each["name"]) in wanted
    ]
    root = bill["metadata"]["component"]
    root["version"] = version
    kept = {each["bom-ref"] for each in bill["components"]} | {root["bom-ref"]}
    bill["dependencies"] = [
        {**each, "dependsOn": sorted(kept & set(each.get("dependsOn", ())))}
        for each in bill["dependencies"]
        if each["ref"] in kept
    ]
    path.write_text(json.dumps(bill, indent=1) + "\n", "utf-8")


def write_sums(files: list[Path], path: Path) -> None:
    """Writes the digests of the files, as sha256sum reads them."""
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    path.write_text("".join(lines), "utf-8")


def release(version: str, root: Path, out: Path, *, is_dry: bool, has_kernels: bool) -> list[Path]:
    """Makes the files of a release in `out` and, unless dry, the commit and the tag."""
    check_before(version, root)
    if not is_dry:
        check_key(root)
    with tempfile.TemporaryDirectory(prefix="release-") as own:
        tree, dist = Path(own, "tree"), Path(own, "dist")
        git("clone", "--quiet", "--no-hardlinks", root, tree)
        for key in ("user.name", "user.email"):
            git("config", key, git("config", key, cwd=root), cwd=tree)
        write_version(version, tree, datetime.datetime.now(datetime.UTC).date())
        git("commit", "--quiet", "--no-gpg-sign", "-am", f"Release {version}", cwd=tree)
        files = build(tree, dist, has_kernels=has_kernels)
        check_files(files, version)
        write_sbom(dist / f"mmdeploy_llm-{version}.cdx.json", version, tree)
        write_sums(sorted(dist.iterdir()), dist / "SHA256SUMS")
        if not is_dry:
            git("fetch", "--quiet", tree, "HEAD", cwd=root)
            git("merge", "--quiet", "--ff-only", "FETCH_HEAD", cwd=root)
            git("tag", "-s", f"v{version}", "-m", f"mmdeploy_llm {version}", cwd=root)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(dist, out)
    return sorted(out.iterdir())


def main() -> None:
    """Reads the command line and says what was made."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("version", help="such as 0.2.0")
    parser.add_argument("--dry-run", action="store_true", help="no commit, no tag")
    parser.add_argument("--pure", action="store_true", help="no wheel with compiled kernels")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="is replaced; dist")
    given = parser.parse_args()
    files = release(
        given.version, ROOT, given.output, is_dry=given.dry_run, has_kernels=not given.pure
    )
    for path in files:
        print(f"{path.stat().st_size / 2**20:8.2f} MiB  {path.name}")
    made = (
        "nothing was committed or tagged"
        if given.dry_run
        else f"committed, tagged v{given.version}"
    )
    print(f"{made}; nothing was uploaded. docs/releasing.md says what comes next")


if __name__ == "__main__":
    main()
