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

    files: that the weights and their shapes were read from. code: files or folders of the packages
        that read and laid them out. A change is seen by their size and the times of their last
        change, of which no program can set the second.
    facts: the options and the machine, of plain values.
    """
    versions = {name: metadata.version(name) for name in ("transformers", "safetensors")}
    where = (torch.__version__, versions, sys.byteorder, platform.machine())
    digest = hashlib.blake2b(repr((where, sorted(facts.items()))).encode(), digest_size=20)
    for path in sorted(set(files)):
        found = path.stat()
        digest.update(repr((str(path.resolve()), *_times(found), found.st_ino)).encode())
    for place in sorted(set(code)):
        for each in sorted(_code_files(place)):
            digest.update(repr(each).encode())
    return digest.hexdigest()


def _times(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _code_files(place: str | Path) -> Iterator[tuple[str, int, int, int]]:
    if not os.path.isdir(place):
        yield str(place), *_times(os.stat(place))
        return
    with os.scandir(place) as entries:
        for entry in entries:
            if entry.name.endswith(CODE):
                yield entry.path, *_times(entry.stat())
            elif entry.is_dir(follow_symlinks=False) and entry.name != "__pycache__":
                yield from _code_files(entry.path)
