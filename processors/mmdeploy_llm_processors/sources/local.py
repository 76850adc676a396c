"""Reads files that are given by a path or a file:// URL."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import MediaLimits, MediaRef
from mmdeploy_llm.media import read_beneath

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
    """Returns the bytes of a file. Messages name it as `ref` does. Raises as read_beneath."""
    return read_beneath(path, limits, name=f"{ref.kind} file {_shown(ref.uri)}")


def _shown(path: str) -> str:
    """Returns the path as the caller gave it, of a very long one both ends; a URL without
    credentials and query."""
    scheme, mark, rest = path.partition("://")
    if mark and scheme.strip().lower() != "file":  # a URL of a scheme that nobody knows
        path = f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}"
    half = MAX_SHOWN // 2
    return repr(path if len(path) <= MAX_SHOWN else f"{path[:half]}...{path[-half:]}")
