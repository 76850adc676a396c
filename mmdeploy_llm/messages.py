"""Types of chat messages and of the media parts that a caller passes in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# {"role": str, "content": str | [part, ...]}; a part is {"type": "text", "text": ...},
# {"type": "image_url", "image_url": {"url": ...}} or {"type": "image", "image": <any form>};
# video parts are written the same way.
Message = Mapping[str, Any]
Conversation = Sequence[Message]

# str | token ids | {"prompt" | "prompt_token_ids", "multimodal_data": {"image": ..., "video": ...}}
Prompt = str | Sequence[int] | Mapping[str, Any]
Prompts = Prompt | Iterable[Prompt]

MEDIA_KINDS = ("image", "video")  # plugins may add others, with a name that MEDIA_KIND matches
MEDIA_KIND = re.compile(r"(?!text$)[a-z][a-z0-9_]*(?<!_url)")
SCHEME = re.compile(r"(data|file):|([a-z][a-z0-9+.-]+)://", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaRef:
    """A media item given by name instead of by value: a path, a file:// or data: URL, an http(s)
    URL.

    kind: "image", "video", or a kind that a plugin adds.
    uri: the text as the caller wrote it.
    caller: "generate" or "chat".
    """

    kind: str
    uri: str
    caller: str = "generate"

    @property
    def scheme(self) -> str:
        """The URL scheme in lower case, "" for a path. Only `data:`, `file:` and `x://` count as
        URLs."""
        match = SCHEME.match(self.uri.lstrip()[:64])
        return (match[1] or match[2]).lower() if match else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaItem:
    """One media item of a prompt, not opened yet.

    kind: the same as in MediaRef.
    source: MediaRef, bytes, or a loaded object (PIL image, numpy array, torch tensor, list of
        frames).
    options: processor options of this item, such as fps for a video.
    """

    kind: str
    source: Any
    options: Mapping[str, Any]
