"""The name of a model's file in the cache: a digest of all that its weights depend on."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

import torch

CODE = (".py", ".cpp", ".h")


def source_key(files: Iterable[Path], code: Iterable[Path], facts: Mapping[str, object]) -> str:
    """Returns the digest.

    files: that the weights and their shapes were read from; a change is seen by their size and the
        times of their last change, of which no program can set the second.
    code: files or folders of the packages that read and laid them out.
    facts: the options and the machine, of plain values.
    """
    versions = {name: metadata.version(name) for name in ("transformers", "safetensors")}
    where = (torch.__version__, versions, sys.byteorder, platform.machine())
    digest = hashlib.blake2b(repr((where, sorted(facts.items()))).encode(), digest_size=20)
    for path in sorted(set(files)):
        found = path.stat()
        times = found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino
        digest.update(repr((str(path.resolve()), *times)).encode())
    for place in sorted(set(code)):
        for name, size, changed in sorted(_code_files(place)):
            digest.update(f"{name} {size} {changed}".encode())
    return digest.hexdigest()


def _code_files(place: str | Path) -> Iterator[tuple[str, int, int]]:
    if not os.path.isdir(place):
        found = os.stat(place)
        yield str(place), found.st_size, found.st_mtime_ns
        return
    with os.scandir(place) as entries:
        for entry in entries:
            if entry.name.endswith(CODE):
                found = entry.stat()
                yield entry.path, found.st_size, found.st_mtime_ns
            elif entry.is_dir(follow_symlinks=False) and entry.name != "__pycache__":
                yield from _code_files(entry.path)
