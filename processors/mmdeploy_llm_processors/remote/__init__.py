"""Fetches media from other machines: http(s) URLs, and object stores through fsspec. Both are off
until the engine's options allow them."""

from __future__ import annotations

from mmdeploy_llm.errors import UnsupportedMediaError
from mmdeploy_llm.hooks import MediaLimits, MediaRef, hookimpl

# Schemes whose error says how to allow them; others may belong to another plugin.
KNOWN_STORES = frozenset({"abfs", "az", "gcs", "gs", "hf", "memory", "oci", "oss", "s3", "s3a"})


@hookimpl(trylast=True)
def fetch_media(ref: MediaRef, limits: MediaLimits) -> bytes | None:
    """Returns the bytes of an http(s) URL or a URL of an allowed scheme; None for all others.

    Raises UnsupportedMediaError while URLs of the scheme are off, MediaTimeoutError after
    `limits.fetch_timeout`, MediaLimitError for more than `limits.max_bytes`, MediaError for a
    refused address and any other failure.
    """
    scheme = ref.scheme
    if scheme in ("http", "https"):
        if not limits.allow_urls:
            raise UnsupportedMediaError(_urls_are_off(ref, scheme))
        from .http import fetch_http

        return fetch_http(ref, limits)
    if scheme in limits.allowed_schemes:
        from .stores import fetch_from_store

        return fetch_from_store(ref, scheme, limits)
    if scheme in KNOWN_STORES:
        raise UnsupportedMediaError(
            f"{scheme}:// is off: the {ref.kind} is given by such a URL; allow it with "
            f"allowed_media_schemes=({scheme!r},) or give a path or bytes"
        )
    return None


def _urls_are_off(ref: MediaRef, scheme: str) -> str:
    return (
        f"URLs are off: the {ref.kind} is given by an {scheme} URL; allow its host with "
        "allowed_media_domains=(...), allow all public hosts with allow_media_urls=True, or "
        "download it and give its path or bytes"
    )
