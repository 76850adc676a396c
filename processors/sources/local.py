"""Reads local files: only regular ones of limited size, below the allowed folder if one is set."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import MediaLimits, MediaRef

MAX_SHOWN_NAME = 60  # characters of a file name in a message

# O_NONBLOCK: opening a FIFO without a writer must not wait. O_NOFOLLOW: links were resolved before.
OPEN_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_BINARY", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_NOFOLLOW", 0)
)


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


def read_local(path: str, kind: str, limits: MediaLimits) -> bytes:
    """Returns the bytes of a regular file. Messages name the file, not its folder.

    Raises MediaError when it cannot be read, is not a regular file or lies outside `allowed_root`
    (links resolved), MediaLimitError when it is larger than `max_bytes`, which is checked before
    reading.
    """
    name = f"{kind} file {_shown(path)}"
    try:
        resolved = Path(path).resolve(strict=True)
        _check_root(resolved, limits.allowed_root, name)
        _check_file(resolved.stat(), name, limits)  # before opening: a device may react to it
        with open(os.open(resolved, OPEN_FLAGS), "rb") as file:
            return _read(file, name, limits)
    except MediaError:
        raise
    except FileNotFoundError:
        raise MediaError(f"{name} does not exist") from None
    except PermissionError:
        raise MediaError(f"{name} cannot be read: permission denied") from None
    except OSError as error:
        raise MediaError(f"{name} cannot be read: {os.strerror(error.errno or 0)}") from None
    except (RuntimeError, ValueError):  # a loop of links; characters not allowed in a file name
        raise MediaError(f"{name} cannot be read: not a usable path") from None


def _check_root(resolved: Path, root: Path | None, name: str) -> None:
    if root is not None and not resolved.is_relative_to(root.resolve()):
        raise MediaError(
            f"{name} is outside the folder that media may be read from (allowed_media_root)"
        )


def _read(file: BinaryIO, name: str, limits: MediaLimits) -> bytes:
    _check_file(os.fstat(file.fileno()), name, limits)
    blob = file.read(limits.max_bytes + 1)  # the file may have grown since the check
    limits.check_bytes(len(blob), name)
    return blob


def _check_file(status: os.stat_result, name: str, limits: MediaLimits) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise MediaError(f"{name} is not a regular file")
    limits.check_bytes(status.st_size, name)


def _shown(path: str) -> str:
    """Returns the last component of the path, shortened."""
    name = os.path.basename(path.rstrip("/\\")) or path[-1:]
    return repr(name if len(name) <= MAX_SHOWN_NAME else name[: MAX_SHOWN_NAME - 3] + "...")
