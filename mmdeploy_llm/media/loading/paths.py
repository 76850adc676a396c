"""Finds local files and folders for splitters that read them by path."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import MediaLimits, MediaRef
from mmdeploy_llm.hooks.names import shown_uri


def local_path(ref: MediaRef, limits: MediaLimits) -> Path | None:
    """Returns the real path of a local file or folder; None for a URL of another place.

    Raises MediaError for one outside `limits.allowed_root` (links resolved), one that does not
    exist, and for devices and their like.
    """
    if ref.scheme not in ("", "file"):
        return None
    name = f"{ref.kind} {shown_uri(ref)}"
    try:
        url = urlsplit(ref.uri.strip()) if ref.scheme else None
        if url is not None and url.netloc.lower() not in ("", "localhost"):
            raise ValueError(url.netloc)
        text = ref.uri if url is None else unquote(url.path)
        found = Path(text).resolve()
        root = found if limits.allowed_root is None else limits.allowed_root.resolve()
        if not found.is_relative_to(root):
            what = "is outside the folder that media may be read from (allowed_media_root)"
        elif found.is_dir() or found.is_file():
            return found
        else:
            what = "is neither a file nor a folder" if found.exists() else "does not exist"
    except (OSError, RuntimeError, ValueError):  # a loop of links; a URL that names a host
        what = "cannot be read: not a usable path"
    raise MediaError(f"{name} {what}")
