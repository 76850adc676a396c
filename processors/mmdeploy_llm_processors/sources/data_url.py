"""data: URLs (RFC 2397): data:[media type][;name=value]...[;base64],payload."""

from __future__ import annotations

import base64
import binascii
from urllib.parse import unquote_to_bytes

from mmdeploy_llm.errors import MediaError, UnsupportedMediaError
from mmdeploy_llm.hooks import MediaLimits, MediaRef

# Types that must match the kind of media; "application/..." says nothing about the content.
MEDIA_TYPES = ("image", "video", "audio", "text")


def read_data_url(ref: MediaRef, limits: MediaLimits) -> bytes:
    """Returns the decoded payload.

    Raises MediaError for a malformed URL, MediaLimitError for a payload over `max_bytes` (estimated
    before it is decoded), UnsupportedMediaError for media of another kind.
    """
    header, comma, payload = ref.uri.strip().partition(",")
    if not comma:
        raise MediaError(
            f"the {ref.kind}'s data: URL has no comma; write data:{ref.kind}/<format>;base64,<data>"
        )
    parameters = header[len("data:") :].lower().split(";")
    _check_type(parameters[0].strip(), ref.kind)
    is_base64 = parameters[-1].strip() == "base64"
    # Lower bound of the decoded size: three characters make one byte at worst (%xx); in base64 four
    # make three.
    least = len(payload) // 4 * 3 - 3 if is_base64 and "%" not in payload else len(payload) // 3
    name = f"the {ref.kind}'s data: URL"
    limits.check_bytes(least, name, is_all=False)
    blob = _from_base64(payload, ref.kind) if is_base64 else _from_percent(payload, ref.kind)
    limits.check_bytes(len(blob), name)
    return blob


def _check_type(media_type: str, kind: str) -> None:
    main = media_type.partition("/")[0]
    if main in MEDIA_TYPES and main != kind:
        raise UnsupportedMediaError(
            f"a data: URL of type {main} was given as {kind}; give data:{kind}/<format>;base64,..."
        )


def _from_percent(payload: str, kind: str) -> bytes:
    try:
        return unquote_to_bytes(payload)
    except UnicodeEncodeError:
        raise MediaError(f"the {kind}'s data: URL holds a lone surrogate; remove it") from None


def _from_base64(payload: str, kind: str) -> bytes:
    """Decodes with or without padding; white space and percent-encoding are allowed."""
    raw = _from_percent(payload, kind) if "%" in payload else payload.encode("utf-8", "replace")
    if any(space in raw for space in b" \t\r\n"):
        raw = raw.translate(None, b" \t\r\n")
    try:
        return base64.b64decode(raw + b"=" * (-len(raw) % 4), validate=True)
    except binascii.Error:
        raise MediaError(f"the {kind}'s data: URL is not valid base64") from None
