"""TemplateParts: writes media parts into messages in the form that a chat template reads.

What a template does with a part is found by rendering a message with one, once for each template.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.media.loading.kinds import ModelMedia
from mmdeploy_llm.messages import MediaItem
from mmdeploy_llm.values.prompt import ChatMessage, TextPart

Part = Mapping[str, Any]
Render = Callable[[str, Sequence[Mapping[str, Any]]], str]

BEGIN, END = "begin of the probe", "end of the probe"
MAX_KEPT = 256  # findings about templates, which prompts may bring
# What a template says that reads the parts of a message.
READS_PARTS = re.compile(r"""['"]type['"]|\.type\b|['"]text['"]|\.text\b|is (not )?string""")


class TemplateParts:
    """Writes media parts for templates. Safe for use from several threads.

    render: renders messages with a template; raises RequestError where it cannot.
    """

    def __init__(self, media: ModelMedia, render: Render) -> None:
        self._media, self._render = media, render
        self._known: dict[tuple[str, str], bool] = {}
        self._lock = threading.Lock()

    def messages(
        self,
        messages: Sequence[ChatMessage],
        groups: Sequence[Sequence[MediaItem]],
        template: str,
    ) -> tuple[Mapping[str, Any], ...]:
        """Returns the messages as dicts, in which the i-th media part is written as parts for the
        items of groups[i]. A template that reads no parts gets texts."""
        left = iter(groups)
        return tuple(self._message(message, left, template) for message in messages)

    def text(self, kind: str, count: int, template: str | None) -> str:
        """Returns what stands for `count` items of a kind in a prompt: what the template writes
        for them where it can be told, else the kind's marker for each."""
        plain = self._media.part_text(kind) * count
        if template is None or not self._renders(kind, template):
            return plain
        text = self._probe(template, [self._native(kind, template)] * count) or ""
        found = text.partition(BEGIN)[2].partition(END)
        pattern = "|".join(map(re.escape, sorted(self._texts(kind), key=len, reverse=True)))
        return found[0] if found[1] and len(re.findall(pattern, found[0])) == count else plain

    def _message(
        self, message: ChatMessage, left: Iterator[Sequence[MediaItem]], template: str
    ) -> Mapping[str, Any]:
        if not isinstance(message.content, tuple):
            return {**message.fields, "content": message.content}
        parts: list[Part] = []
        for part in message.content:
            if isinstance(part, TextPart):
                parts.append({"type": "text", "text": part.text})
            else:
                parts += [self._part(item.kind, template) for item in next(left)]
        if not self._reads_parts(template):
            texts = (part.get("text", "") for part in parts)
            return {**message.fields, "content": "\n".join(texts)}
        return {**message.fields, "content": parts}

    def _part(self, kind: str, template: str) -> Part:
        if self._renders(kind, template):
            return self._native(kind, template)
        return {"type": "text", "text": self._media.part_text(kind)}

    def _native(self, kind: str, template: str) -> Part:
        others = [name for name, own in self._media.part_types.items() if own == kind]
        return part_for(kind, template, others)

    def _renders(self, kind: str, template: str) -> bool:
        """Whether the template writes a marker of the kind for such a part."""

        def find() -> bool:
            text = self._probe(template, [self._native(kind, template)])
            if text is None:  # it may want other messages than the probe
                return re.search(rf"""['"]{kind}(_url)?['"]""", template) is not None
            return any(marker in text for marker in self._texts(kind))

        return self._remembered(kind, template, find)

    def _reads_parts(self, template: str) -> bool:
        """Whether the template reads the parts of a message rather than its text alone."""

        def find() -> bool:
            text = self._probe(template, [])
            if text is None:
                return READS_PARTS.search(template) is not None
            is_shown = any(f"{quote}{BEGIN}{quote}" in text for quote in "'\"")
            return BEGIN in text and END in text and not is_shown

        return self._remembered("", template, find)

    def _remembered(self, kind: str, template: str, find: Callable[[], bool]) -> bool:
        with self._lock:
            known = self._known.get((kind, template))
        if known is None:
            known = find()
            with self._lock:
                if len(self._known) < MAX_KEPT:
                    self._known[kind, template] = known
        return known

    def _probe(self, template: str, parts: Sequence[Part]) -> str | None:
        """Returns a rendered message with these parts between BEGIN and END; None where the
        template refuses it."""
        texts = [{"type": "text", "text": text} for text in (BEGIN, END)]
        content = [texts[0], *parts, texts[1]]
        try:
            return self._render(template, [{"role": "user", "content": content}])
        except RequestError:
            return None

    def _texts(self, kind: str) -> tuple[str, ...]:
        processor = self._media.processors[kind]
        return (processor.token, *processor.markers)


def part_for(kind: str, template: str, others: Sequence[str] = ()) -> Part:
    """Returns the part that a template sees: the type it tests for, and the keys for a template
    that tests keys. others: types of the kind beside itself and "<kind>_url"."""
    url = f"{kind}_url"
    own = [url] if url in template else []
    own += [each for each in (kind, *others) if re.search(rf"""['"]{each}['"]""", template)]
    keys = {key: {"url": kind} for key in (url, *others)}
    return {"type": next(iter(own), kind), kind: kind, **keys}
