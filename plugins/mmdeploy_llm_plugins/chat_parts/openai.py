"""Writes content parts of OpenAI's interfaces as texts and media."""

from __future__ import annotations

import mimetypes
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from mmdeploy_llm.hooks import ChatPartContext

MAX_TYPE = 100  # characters at the beginning of a data: URL
MAX_NAME = 80
UPLOADED = "; files that were uploaded are not here"

Parts = tuple[str | Mapping[str, Any], ...]


def text(part: Mapping[str, Any], about: ChatPartContext) -> Parts:
    """Returns the text of an `input_text` or `output_text`."""
    return (part["text"],)


def refusal(part: Mapping[str, Any], about: ChatPartContext) -> Parts:
    """Returns the text of a refusal."""
    return (part["refusal"],)


def image(part: Mapping[str, Any], about: ChatPartContext) -> Parts:
    """Returns an image by its URL, {"url": ...}, or as a loaded object. Raises ValueError for a
    part without one."""
    source = part.get("image_url", part.get(part["type"]))
    if isinstance(source, Mapping):
        source = source.get("url")
    if source is None:
        hint = UPLOADED if part.get("file_id") else ""
        raise ValueError(f"{part['type']} has no URL{hint}")
    return ({"type": "image", "image": source},)


def file(part: Mapping[str, Any], about: ChatPartContext) -> Parts:
    """Returns a file as an item of the kind that its name or its data: URL says. Raises ValueError
    for a file without a source or of an unknown kind."""
    own = part.get("file", part)
    source = own.get("file_data") or own.get("file_url")
    if not isinstance(source, str):
        hint = UPLOADED if own.get("file_id") else ""
        raise ValueError(f"{part['type']} has no file_data and no file_url{hint}")
    is_data = source[:5].lower() == "data:"
    named = own.get("filename") or ("" if is_data else urlsplit(source).path)
    announced = source[5:MAX_TYPE].partition(",")[0].partition(";")[0] if is_data else ""
    names = (str(named), f"x{mimetypes.guess_extension(announced) or ''}")
    kind = next(filter(None, map(about.kind_of, names)), None)
    if kind is None:
        raise ValueError(
            f"the file {str(named or announced)[:MAX_NAME]!r} is of no kind of media that is "
            f"known: {', '.join(about.kinds)}"
        )
    if not is_data and own.get("file_data"):
        source = f"data:;base64,{source}"
    return ({"type": kind, kind: source},)
