"""The forms in which a caller gives media, brought to one: kind, source and options.

{"image": ["a.jpg", {"image": b"...", "image_tokens": 256}]}
{"type": "image_url", "image_url": {"url": ...}}
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmdeploy_llm.errors import MediaError, RequestError, UnsupportedMediaError
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.messages import MEDIA_KINDS, MediaItem, MediaRef
from mmdeploy_llm.values.text.display import shown

MEDIA_KEYS = ("multimodal_data", "multi_modal_data")
IGNORED = frozenset({"detail", "uuid"})  # keys of OpenAI's and FastDeploy's image parts
Change = Callable[[MediaItem], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeds:
    """Embeddings of one media item, unchecked. grid: None where none was given."""

    values: Any
    grid: Any = None


def changed(item: MediaItem, change: Change, *, is_in_part: bool = False) -> MediaItem:
    """Returns an item with what `change` makes of its source, and of each frame of one that is a
    list of them. is_in_part: whether a part of a message has the item."""
    source = item.source
    if isinstance(source, MediaRef):
        made = change(MediaItem(kind=item.kind, source=source.uri, options=item.options))
        if made == source.uri:
            return item
        return replace(item, source=replace(source, uri=made) if isinstance(made, str) else made)
    if isinstance(source, Embeds):
        return item
    if isinstance(source, (list, tuple)) and not is_one(source):
        # Only a plugin knows what nested values of its kind mean.
        if item.kind not in MEDIA_KINDS and not is_in_part:
            return replace(item, source=change(item))
        frames = [changed(replace(item, source=each), change) for each in source]
        return replace(item, source=[frame.source for frame in frames])
    return replace(item, source=change(item))


def item_of_part(part: Mapping[str, Any], part_type: str, kind: str, location: str) -> MediaItem:
    """Reads the media of a part: under the part's own type, as a value or as {"url": ...}; its
    source is None for a part without. Raises RequestError for a part with several."""
    names, given = _keys(part, part_type, kind)
    if any(not _is_same(part[given[0]], part[name]) for name in given[1:]):
        raise RequestError(
            f"{location}: the part has {' and '.join(map(repr, given))}; give one of them"
        )
    options = {key: part[key] for key in part if key not in (*names, "type", *IGNORED)}
    source = part[given[0]] if given else None
    if isinstance(source, Mapping) and "url" in source:
        own = {key: value for key, value in source.items() if key not in ("url", *IGNORED)}
        source, options = source["url"], {**options, **own}
    item = MediaItem(kind=kind, source=source, options=options)
    return item if source is None else normalised(item, "chat")


def _keys(
    part: Mapping[str, Any], part_type: str, kind: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the keys under which a part may have media, and those under which it has."""
    names = tuple(dict.fromkeys((part_type, kind, f"{kind}_url", "url", "path")))
    return names, tuple(name for name in names if part.get(name) is not None)


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, str) and isinstance(other, str) and one == other)


def is_one(values: Sequence[Any]) -> bool:
    """Returns whether a list is one item by itself, such as the samples of a sound."""
    if _is_pair(values):
        return True
    while isinstance(values, (list, tuple)) and values:
        values = values[0]
    return isinstance(values, (int, float))


def media_items(data: Any, kinds: Sequence[str] = MEDIA_KINDS) -> list[MediaItem]:
    """Returns the items of a prompt's `multimodal_data`, kind by kind, unopened.

    data: {"image": one item or a list, "video": ...} or None; or the embeddings of one item,
        {"image_embeds": ..., "grid": ...}. Raises RequestError for another shape and for a kind
        that is not in `kinds`.
    """
    if data is None:
        return []
    if not isinstance(data, Mapping):
        raise RequestError(
            "multimodal_data must be a dict such as {'image': [...]}, got " + type(data).__name__
        )
    embedded = next((kind for kind in kinds if f"{kind}_embeds" in data), None)
    if embedded is not None:
        data = {embedded: data}
    items = []
    for kind, values in data.items():
        if kind not in kinds:
            near = difflib.get_close_matches(str(kind), kinds, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(kinds)}"
            raise RequestError(f"multimodal_data has an unknown kind {kind!r}; {hint}")
        single = not isinstance(values, (list, tuple)) or _is_pair(values)
        values = ([] if values is None else [values]) if single else values
        items += [
            normalised(MediaItem(kind=kind, source=value, options={}), "generate")
            for value in values
        ]
    return items


def _is_pair(values: Any) -> bool:
    """Whether a tuple is one item, such as samples with their rate, not two items."""
    if not isinstance(values, tuple) or len(values) != 2:
        return False
    return sum(isinstance(value, (int, float)) for value in values) == 1


def normalised(item: MediaItem, caller: str) -> MediaItem:
    """Returns the item with names as MediaRef, bytes-like objects as bytes, a dict with embeddings
    as Embeds. A dict may give an item with its options, {"pdf": ..., "pages": "1-5"}, and one as
    OpenAI's input_audio does, {"data": base64, "format": ...}. Raises RequestError."""
    source, options, embeds = item.source, item.options, f"{item.kind}_embeds"
    if isinstance(source, Mapping) and embeds in source:
        others = {key: source[key] for key in source if key not in (embeds, "grid")}
        given = Embeds(values=source[embeds], grid=source.get("grid"))
        return MediaItem(kind=item.kind, source=given, options={**options, **others})
    if isinstance(source, Mapping) and item.kind in source:
        options = {**options, **{key: source[key] for key in source if key != item.kind}}
        source = source[item.kind]
        if isinstance(source, Mapping) and item.kind in source:
            raise RequestError(
                f"the {item.kind} is a dict in a dict; give {{{item.kind!r}: ..., and its options}}"
            )
    if isinstance(source, Mapping) and _is_base64(source):
        source = _data_url(item.kind, source)
    # Rows of `datasets`; tables have no fields that are null.
    if isinstance(source, Mapping) and source and set(source) <= {"bytes", "path"}:
        source = source.get("path") if source.get("bytes") is None else source["bytes"]
    if source is None:
        raise MediaError(f"the {item.kind} is None; give a path, bytes or a loaded object")
    if isinstance(source, os.PathLike):
        source = os.fsdecode(source)
    if isinstance(source, str):
        source = MediaRef(kind=item.kind, uri=source, caller=caller)
    if isinstance(source, (bytearray, memoryview)):
        source = bytes(source)
    if item.kind == "video" and isinstance(source, (list, tuple)):
        source = _with_files(source, caller)
    return MediaItem(kind=item.kind, source=source, options=options)


def _with_files(frames: Sequence[Any], caller: str) -> Sequence[Any]:
    """Returns the frames of a video, those that are files as MediaRefs: messages may name
    them."""
    names = [os.fsdecode(each) if isinstance(each, os.PathLike) else each for each in frames]
    if not any(isinstance(name, str) for name in names):
        return frames
    return [
        MediaRef(kind="image", uri=name, caller=caller) if isinstance(name, str) else name
        for name in names
    ]


def _is_base64(source: Mapping[str, Any]) -> bool:
    """Whether an item is meant as base64; `data` alone may be an array."""
    keys = set(source)
    return keys == {"data", "format"} or (keys == {"data"} and isinstance(source["data"], str))


def _data_url(kind: str, source: Mapping[str, Any]) -> str:
    """Returns the data: URL of an item given as base64."""
    data, form = source["data"], source.get("format")
    is_text = isinstance(data, str) and not data.startswith("data:")
    if not is_text or not isinstance(form, str) or not form.isalnum():
        raise MediaError(
            f"the {kind} must have its bytes in base64 as 'data', without data:, and the name of "
            f"their format as 'format', got {shown(data)} and {shown(form)}"
        )
    return f"data:{kind}/{form};base64,{data}"


def read_file(file: Any, kind: str, limits: MediaLimits) -> bytes:
    """Reads a file object, from its start if it can seek; its position is restored. Raises
    MediaError."""
    try:
        can_seek = callable(getattr(file, "seekable", None)) and file.seekable()
        position = file.tell() if can_seek else None
        if can_seek:
            file.seek(0)
        blob = file.read(limits.max_bytes + 1)
        if can_seek:
            file.seek(position)
    except (OSError, ValueError) as error:
        fault = "it is closed" if getattr(file, "closed", False) else type(error).__name__
        raise MediaError(f"the {kind}'s file object cannot be read: {fault}") from error
    if not isinstance(blob, bytes):
        raise UnsupportedMediaError(
            f"the {kind}'s file object returns {type(blob).__name__}, not bytes; open it in mode "
            "'rb'"
        )
    limits.check_bytes(len(blob), f"the {kind}'s file object", is_all=False)
    return blob
