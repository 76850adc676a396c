"""Reads local files: only regular ones of limited size, below the allowed folder if one is set."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import MediaLimits, MediaRef

from .beneath import OPEN_FLAGS, open_beneath

MAX_SHOWN = 500  # characters of a path in a message


def path_of_url(ref: MediaRef) -> str:
    """Returns the path in a file:// URL. Raises MediaError for a URL that names another host."""
    try:
        parts = urlsplit(ref.uri.strip())
    except ValueError:
        raise MediaError(f"the {ref.kind} is given by a malformed file:// URL") from None
    if parts.netloc.lower() not in ("", "localhost"):
        raise MediaError(
            f"the {ref.kind}'s file:// URL names a host; write file:///absolute/path for a local "
            "file"
        )
    # A "?" or "#" that was not percent-encoded belongs to the file name: files have no query.
    rest = "".join(
        mark + part for mark, part in (("?", parts.query), ("#", parts.fragment)) if part
    )
    return unquote(parts.path + rest)


def read_local(path: str, ref: MediaRef, limits: MediaLimits) -> bytes:
    """Returns the bytes of a regular file. Messages name it as `ref` does, not by the path that
    links lead to.

    Raises MediaError when it cannot be read, is not a regular file or lies outside `allowed_root`
    (links resolved, see open_beneath), MediaLimitError when it is larger than `max_bytes`, which is
    checked before reading.
    """
    name = f"{ref.kind} file {_shown(ref.uri)}"
    try:
        with open(_opened(path, limits.allowed_root, name), "rb") as file:
            return _read(file, name, limits)
    except MediaError:
        raise
    except FileNotFoundError:
        raise MediaError(f"{name} does not exist") from None
    except PermissionError:
        raise MediaError(f"{name} cannot be read: permission denied") from None
    except OSError as error:
        raise MediaError(_reason(name, error.errno or 0)) from None
    except (RuntimeError, ValueError):  # a loop of links; characters not allowed in a file name
        raise MediaError(f"{name} cannot be read: not a usable path") from None


def _opened(path: str, root: Path | None, name: str) -> int:
    """Returns a descriptor of the file; with a root, of a file below it only."""
    if root is None:
        resolved = Path(path).resolve(strict=True)
        _check_type(resolved.lstat(), name)
        return os.open(resolved, OPEN_FLAGS)
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
            "nor /proc; mount /proc or give the file's bytes"
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


def _shown(path: str) -> str:
    """Returns the path as the caller gave it, of a very long one both ends; a URL without
    credentials and query."""
    scheme, mark, rest = path.partition("://")
    if mark and scheme.strip().lower() != "file":  # a URL of a scheme that nobody knows
        path = f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}"
    half = MAX_SHOWN // 2
    return repr(path if len(path) <= MAX_SHOWN else f"{path[:half]}...{path[-half:]}")
