"""A library file that is loaded only if it is whole and nobody else could have written it.

    library | digest of library and file name | MARK

A library that was cut off, zeroed or mixed up crashes the process that loads it, and one that
somebody else has planted runs. Loaders ignore what stands after a library.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from mmdeploy_llm.system.portable import files

MARK = b"mmdeploy_llm seal"
DIGEST_SIZE = 32  # bytes
WRITABLE = stat.S_IWGRP | stat.S_IWOTH


class BuildError(Exception):
    """Raised when the library cannot be built or loaded on this machine; the text says why."""


class ForeignError(BuildError):
    """Raised for a folder or library that other users own or may write."""


def write_sealed(library: bytes, path: Path, folder: Path) -> None:
    """Writes a library with its seal to `path`, whole or not at all, also when the machine stops.
    folder: an empty one on the same disk."""
    new = folder / path.name
    with new.open("xb") as file:
        file.write(library + _digest(library, path) + MARK)
        files.make_readable(file.fileno())
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def is_intact(path: Path) -> bool:
    """Whether the file is as `write_sealed` wrote it, under the same name."""
    if not path.is_file():
        return False
    data = path.read_bytes()
    library, seal = data[: -DIGEST_SIZE - len(MARK)], data[-DIGEST_SIZE - len(MARK) :]
    return seal == _digest(library, path) + MARK


def check_owner(path: Path, harm: str = "whose code would run") -> None:
    """Raises ForeignError unless the file or folder belongs to this user or root, and only its
    owner may write it. harm: what else could be, for the message."""
    check_status(path, path.stat(), harm)


def check_status(path: Path, found: os.stat_result, harm: str) -> None:
    """Checks as `check_owner` does what the system says of a file or folder."""
    user = files.own_user()
    if user is None:  # Windows: the folder below the user's home says who may write
        return
    if found.st_uid not in (user, 0):
        problem, advice = f"belongs to user {found.st_uid}", "give it to this user"
    elif found.st_mode & WRITABLE:
        problem, advice = "may be written by other users", f"run: chmod go-w {str(path)!r}"
    else:
        return
    raise ForeignError(f"{path} {problem}, {harm}; {advice}, or delete it")


def _digest(library: bytes, path: Path) -> bytes:
    return hashlib.blake2b(path.name.encode() + b"\0" + library, digest_size=DIGEST_SIZE).digest()
