"""The forms in which tables hold media in a cell, brought to those that prompts have.

bytes | a path, URL or data: URL | base64 | {"bytes", "path", ...} | a struct with one of these
      | samples {"array", "sampling_rate"} | pixels, as an array or nested lists | lists of them
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmdeploy_llm.data.files.kinds import kind_of_bytes
from mmdeploy_llm.data.records.template import shown
from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.hooks import KindTable

NAMES = ("path", "url", "uri", "src", "image", "video", "audio", "image_url")  # keys of a name
BASE64 = re.compile(r"[A-Za-z0-9+/\s]{64,}={0,2}\s*")
HEAD = 64  # characters of base64, which show the first bytes
# How texts begin that programs have made of what is no text: bytes, structs of them, pictures.
REPR = re.compile(r"b(['\"])(\\x|RIFF|GIF8|BM|ID3|OggS)|\{'bytes': b|<PIL\.")
CHANNELS, LEAST_SIDE = (1, 3, 4), 16  # of pixels in a column that is not named after media
PIXEL_DIMS = {"image": (2, 3), "video": (4,)}  # of one item; more of them are several


def media_values(value: Any, kind: str, kinds: KindTable) -> Iterator[Any]:
    """Yields the media of a cell, none for an empty one: bytes, a name, an array [H, W] or
    [H, W, C] (video: [T, H, W, C]), or a dict with samples.

    Fields beside the media, such as width or mime, are not read. Raises RequestError for another
    form, with what was found.
    """
    if isinstance(value, Mapping) and isinstance(value.get(kind), str):
        yield value  # a name with its options, as in prompts
        return
    value = _plain(value, kinds)
    if is_array(value) and value.ndim > max(PIXEL_DIMS.get(kind, (value.ndim,))):
        yield from value
    elif isinstance(value, list):
        for each in value:
            yield from media_values(each, kind, kinds)
    elif isinstance(value, Mapping) and "array" not in value:
        raise RequestError(
            f"the cell is a dict with the keys {shown(value)}, in which no {kind} was found; known "
            "are bytes, path and url beside anything else, or bytes of media under one key"
        )
    elif kind in PIXEL_DIMS and _is_flat(value):
        raise RequestError(f"the cell is a number or a row of numbers, which is no {kind}")
    elif value is not None:
        yield value


def kind_of_cell(value: Any, kinds: KindTable) -> tuple[str | None, Any]:
    """Returns the kind of media that a cell's first bytes or name show, and the first of its media
    in a plain form; None where nothing shows it."""
    value = _plain(value, kinds)
    while isinstance(value, list) and value:
        value = _plain(value[0], kinds)
    if isinstance(value, bytes):
        return kind_of_bytes(value, kinds), value
    return (kinds.of_name(value) if isinstance(value, str) else None), value


def looks_like_media(value: Any, kinds: KindTable) -> bool:
    """Whether bytes of media are anywhere in a value, or it is pixels, or a text that Python has
    made of one of these."""
    if isinstance(value, bytes):
        return kind_of_bytes(value, kinds) is not None
    if isinstance(value, str):
        return REPR.match(value) is not None
    if isinstance(value, Mapping):
        return any(looks_like_media(each, kinds) for each in value.values())
    if isinstance(value, list) and value and not isinstance(value[0], list):
        return looks_like_media(value[0], kinds)
    found = _plain(value, kinds)
    return is_array(found) and _are_pixels(found)


def _are_pixels(array: Any) -> bool:
    """Whether an array may be a picture or several; vectors and tables of points are none."""
    sides = [size for size in array.shape if size not in CHANNELS]
    is_coloured = array.dtype.name == "uint8" or len(sides) < array.ndim
    return is_coloured and len(sides) > 1 and min(sides) >= LEAST_SIDE


def is_array(value: Any) -> bool:
    """Whether a value is an array of numpy, which is imported only where there is one; pictures of
    Pillow have that interface too, and no axes."""
    return hasattr(value, "__array_interface__") and hasattr(value, "ndim")


def _is_flat(value: Any) -> bool:
    return isinstance(value, (int, float)) or (is_array(value) and value.ndim < 2)


def _plain(value: Any, kinds: KindTable) -> Any:
    """Returns one medium in a plain form, a list of several, or what was given."""
    if isinstance(value, list):
        return _numbers(value, kinds)
    if isinstance(value, str):
        return _of_base64(value, kinds)
    return _of_struct(value, kinds) if isinstance(value, Mapping) else value


def _of_struct(value: Mapping[str, Any], kinds: KindTable) -> Any:
    """Returns the one medium of a struct; the struct where it has none or several."""
    if value.get("array") is not None:  # decoded by `datasets`
        return {name: own for name, own in value.items() if name != "path"}
    data = value.get("bytes")
    if data is not None:
        return _plain(data, kinds)
    if value.keys() <= {"bytes", "path"}:
        return value.get("path")
    within = [_plain(own, kinds) for own in value.values() if not isinstance(own, str)]
    found = [own for own in within if _is_known(own, kinds)]
    if not found:  # names may stand for other things, too
        found = [own for own in within if isinstance(own, str)]
        found += [value[name] for name in NAMES if isinstance(value.get(name), str)]
    return found[0] if len(found) == 1 else value


def _is_known(value: Any, kinds: KindTable) -> bool:
    """Whether a plain value shows that it is media: bytes of it, pixels, or samples."""
    if isinstance(value, bytes):
        return kind_of_bytes(value, kinds) is not None
    if is_array(value):
        return bool(value.ndim > 1)
    return isinstance(value, Mapping) and "array" in value


def _of_base64(text: str, kinds: KindTable) -> Any:
    """Returns the bytes of media that a text has as base64, else the text."""
    try:
        head = base64.b64decode(text[:HEAD], validate=True)
        if len(text) < HEAD or kind_of_bytes(head, kinds) is None or not BASE64.fullmatch(text):
            return text
        return base64.b64decode(text)
    except ValueError:
        return text


def _numbers(value: Sequence[Any], kinds: KindTable) -> Any:
    """Returns nested lists of numbers as an array, whole numbers as bytes of media or pixels; other
    lists as they are."""
    first: Any = value
    while isinstance(first, list) and first:
        first = first[0]
    if isinstance(first, bool) or not isinstance(first, (int, float)):
        return value
    import numpy as np

    try:
        array = np.asarray(value)
    except ValueError:  # lists of several lengths
        return value
    if array.dtype.kind not in "iu" or array.min() < 0 or array.max() > 255:
        return array.astype(np.float32) if array.dtype.kind == "f" else array
    data = array.astype(np.uint8)
    if array.ndim == 1 and kind_of_bytes(blob := data.tobytes(), kinds) is not None:
        return blob
    return data
