"""Fetches media by name from this machine: paths, file:// URLs and data: URLs. Never uses the
network."""

from __future__ import annotations

from mmdeploy_llm.hooks import MediaLimits, MediaRef, hookimpl

from .data_url import read_data_url
from .local import path_of_url, read_local


@hookimpl(trylast=True)
def fetch_media(ref: MediaRef, limits: MediaLimits) -> bytes | None:
    """Returns the bytes of a local file or a data: URL; None for URLs of other schemes.

    Raises MediaLimitError for more than `limits.max_bytes`, MediaError for a file that cannot or
    must not be read.
    """
    scheme = ref.scheme
    if scheme == "data":
        return read_data_url(ref, limits)
    if scheme == "file":
        return read_local(path_of_url(ref), ref, limits)
    return None if scheme else read_local(ref.uri, ref, limits)
