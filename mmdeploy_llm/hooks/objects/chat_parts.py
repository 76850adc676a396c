"""ChatPartSpec: a further type of the content parts of chat messages, and what it becomes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mmdeploy_llm.messages import MEDIA_KINDS

# The types of parts that stay as they are.
OWN_TYPES = ("text", *MEDIA_KINDS, *(f"{kind}_url" for kind in MEDIA_KINDS))
CHAT_PART_TYPE = re.compile(rf"(?!({'|'.join(OWN_TYPES)})$)[a-z][a-z0-9_]*")
KEY_TYPES = (str, int, float, bool, list, dict, object)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPartSpec:
    """Types of content parts that become other parts before a chat template renders them.

    name: in lists and messages.
    types: what the part's "type" says, such as "location". "text", and the kinds of media with
        their "<kind>_url", are nobody's to take.
    factory: "module:function", called as function(part, about) with a dict of the part's keys and
        values, checked, which it leaves as it is, and a ChatPartContext. It returns a sequence of
        parts, () for none: texts, and dicts such as {"type": "image", "image": bytes or a path}.
        They may be of types that plugins add, to a depth of 8. Raises ValueError, or a
        RequestError, for a part that is wrong; the message begins with the part's path. Called from
        several threads at once, within media_timeout.
    keys: the part's keys beside "type", and the types of their values: str, int, float (which a
        whole number is, too), bool, list, dict, or object for anything.
    optional: the same for keys that a part may leave out; "*" stands for all other keys.
    models: names of ModelSpecs, or ("*",) for any; a named family beats "*".
    files: keys whose values are paths or URLs, which a corpus gives relative to its own folder and
        whose files are part of an item's digest.
    late: whether the function opens files, or asks what the model takes: it is then called when
        a prompt is prepared. Otherwise it may be called when a corpus is read, so that the media
        in what it returns have names and previews, and the result depends on the part alone.
    """

    name: str
    types: tuple[str, ...]
    factory: str
    keys: Mapping[str, type] = field(default_factory=dict)
    optional: Mapping[str, type] = field(default_factory=dict)
    models: tuple[str, ...] = ("*",)
    files: tuple[str, ...] = ()
    late: bool = False
    priority: int = 0

    @property
    def has_files(self) -> bool:
        """Whether its `files` are keys of the part."""
        return not {*self.files} - {*self.keys, *self.optional}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPartContext:
    """Tells the function of a ChatPartSpec what it may need.

    kinds: the kinds of media that parts may have. kind_of: returns the kind of a file of this name,
        None for an unknown suffix.
    takes: the kinds that the model takes. fetch: returns the bytes of a path or URL within the
        limits on media; raises MediaError. Both are for specs with `late`.
    """

    kinds: tuple[str, ...]
    kind_of: Callable[[str], str | None]
    takes: tuple[str, ...] = ()
    fetch: Callable[[str], bytes] | None = None


def are_keys(value: object) -> bool:
    """Whether a value says which keys a part has."""
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and name not in ("", "type") and own in KEY_TYPES
        for name, own in value.items()
    )
