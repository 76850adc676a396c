"""Reads local files: only regular ones of limited size, below the allowed folder if one is set."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.system.portable.files import open_unfollowed

from .beneath import open_beneath


def read_beneath(path: str | Path, limits: MediaLimits, *, name: str | None = None) -> bytes:
    """Returns the bytes of a regular file below `limits.allowed_root`; of any where that is None.

    name: of the file in messages, the path by default: never the path that links lead to. Raises
    MediaError when it cannot be read, is not a regular file or lies outside (links resolved, see
    open_beneath), MediaLimitError when it is larger than `limits.max_bytes`, which is checked
    before reading.
    """
    name = f"the file {str(path)!r}" if name is None else name
    try:
        with open(_opened(path, limits.allowed_root, name), "rb") as file:
            return _read(file, name, limits)
    except MediaError:
        raise
    except FileNotFoundError:
        hint = "; ~ is not read as your home folder" if str(path).startswith("~") else ""
        raise MediaError(f"{name} does not exist{hint}") from None
    except PermissionError:
        raise MediaError(f"{name} cannot be read: permission denied") from None
    except OSError as error:
        raise MediaError(_reason(name, error.errno or 0)) from None
    except (RuntimeError, ValueError):  # a loop of links; characters not allowed in a file name
        raise MediaError(f"{name} cannot be read: not a usable path") from None


def _opened(path: str | Path, root: Path | None, name: str) -> int:
    """Returns a descriptor of the file; with a root, of a file below it only."""
    if root is None:
        resolved = Path(path).resolve(strict=True)
        _check_type(resolved.lstat(), name)
        return open_unfollowed(resolved, os.O_RDONLY)
    root = root.resolve()
    # Not strict, so that outside the root files that exist are not told from those that do not.
    resolved = Path(path).resolve()
    if not resolved.is_relative_to(root):
        raise MediaError(_outside(name))
    _check_type(resolved.lstat(), name)
    return open_beneath(root, resolved.relative_to(root))


def _reason(name: str, code: int) -> str:
    if code == errno.EXDEV:
        return _outside(name)
    if code == errno.ENOTSUP:
        return (
            f"{name} cannot be checked against allowed_media_root: this system has neither openat2 "
            "nor a way to tell the path of an open file; mount /proc or give the file's bytes"
        )
    return f"{name} cannot be read: {os.strerror(code)}"


def _outside(name: str) -> str:
    return f"{name} is outside the folder that media may be read from (allowed_media_root)"


def _read(file: BinaryIO, name: str, limits: MediaLimits) -> bytes:
    status = os.fstat(file.fileno())
    _check_type(status, name)  # again: another file may have taken the path since it was checked
    limits.check_bytes(status.st_size, name)
    # The file may have grown since the check. None: a file of the kernel has no data yet.
    blob = file.read(limits.max_bytes + 1) or b""
    limits.check_bytes(len(blob), name)
    return blob


def _check_type(status: os.stat_result, name: str) -> None:
    """Called before opening, because a device may react to it, and after."""
    if not stat.S_ISREG(status.st_mode):
        raise MediaError(f"{name} is not a regular file")
