"""Reads object stores and similar through fsspec, with the credentials that fsspec finds."""

from __future__ import annotations

from typing import Any

from mmdeploy_llm.errors import MediaError, UnsupportedMediaError
from mmdeploy_llm.hooks import MediaLimits, MediaRef

from .deadline import Deadline

CHUNK_BYTES = 2**20
MAX_SHOWN_NAME = 40  # characters of an object's name in a message

# fsspec's file systems that give access to local files, to any URL or to other file systems.
LEAD_ELSEWHERE = frozenset(
    (
        "asynclocal",
        "asyncwrapper",
        "blockcache",
        "cached",
        "dir",
        "filecache",
        "generic",
        "git",
        "http-sync",
        "https-sync",
        "libarchive",
        "reference",
        "simplecache",
        "tar",
        "zip",
    )
)


def fetch_from_store(ref: MediaRef, scheme: str, limits: MediaLimits) -> bytes:
    """Returns the bytes of an object such as s3://bucket/photo.jpg.

    Raises UnsupportedMediaError for a scheme that fsspec does not know or whose package is missing,
    MediaLimitError for more than `max_bytes`, checked before and while reading, MediaTimeoutError
    after `fetch_timeout` between two chunks, MediaError for any other failure. A store that does
    not answer at all is bounded by the caller's deadline.
    """
    if scheme in LEAD_ELSEWHERE:
        raise UnsupportedMediaError(
            f"{scheme}:// gives access to files of other schemes and cannot be allowed by "
            "allowed_media_schemes"
        )
    uri = f"{scheme}://{ref.uri.strip().partition('://')[2]}"
    name = f"{ref.kind} {_shown(uri, scheme)}"
    return _read(uri, scheme, name, limits, Deadline(limits.fetch_timeout, name))


def _read(uri: str, scheme: str, name: str, limits: MediaLimits, deadline: Deadline) -> bytes:
    files = _file_system(scheme)
    try:
        # The path is used literally, so that no chained URL (s3://...::file://...) is followed.
        path = files._strip_protocol(uri)
        _check_info(files.info(path), name, limits)
        with files.open(path, "rb") as file:
            return _read_all(file, name, limits, deadline)
    except MediaError:
        raise
    except FileNotFoundError:
        raise MediaError(f"{name} does not exist") from None
    except PermissionError:
        raise MediaError(f"{name} cannot be read: access denied; check the credentials") from None
    except Exception as error:  # stores raise anything; the text may name folders and accounts
        raise MediaError(f"{name} cannot be read: {type(error).__name__}") from error


def _file_system(scheme: str) -> Any:
    """Opens the file system of a scheme. Raises UnsupportedMediaError that says what to install."""
    try:
        import fsspec
    except ImportError:
        raise UnsupportedMediaError(
            f"{scheme}:// needs fsspec: pip install mmdeploy-llm[fsspec]"
        ) from None
    try:
        return fsspec.filesystem(scheme)
    except ImportError as error:  # its text says which package
        raise UnsupportedMediaError(f"{scheme}:// needs a package: {error}") from None
    except ValueError as error:
        raise UnsupportedMediaError(f"fsspec cannot open {scheme}://: {error}") from None


def _check_info(info: dict[str, Any], name: str, limits: MediaLimits) -> None:
    if info.get("type") == "directory":
        raise MediaError(f"{name} is a folder, not a file")
    size = info.get("size")
    if isinstance(size, int):
        limits.check_bytes(size, name)


def _read_all(file: Any, name: str, limits: MediaLimits, deadline: Deadline) -> bytes:
    """Reads the file in chunks: its reported size may be wrong or missing, and time may run out."""
    blob = bytearray()
    while deadline.left():
        chunk = file.read(min(CHUNK_BYTES, limits.max_bytes + 1 - len(blob)))
        if not chunk:
            break
        blob += chunk
        limits.check_bytes(len(blob), name, is_all=False)
    return bytes(blob)


def _shown(uri: str, scheme: str) -> str:
    """Returns the scheme and the last component of the path, shortened."""
    last = uri.partition("://")[2].partition("?")[0].rstrip("/").rpartition("/")[2]
    last = last.rpartition("@")[2]
    return f"{scheme}://.../{last if len(last) <= MAX_SHOWN_NAME else last[:37] + '...'}"
