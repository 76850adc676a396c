"""Other forms of an output: plain data, three lines of text, HTML."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from mmdeploy_llm.values.text.display import shown

MAX_TEXT = 300  # characters of a text in the three lines
MAX_MEDIA = 4  # of a prompt, and completions, that are shown
NO_MEDIA = {  # keys of prompts and messages under which texts are no names of media
    *("adapter", "chat_template", "chat_template_kwargs", "mm_processor_kwargs", "prompt"),
    *("name", "prompt_token_ids", "reasoning_content", "role", "text", "tool_call_id"),
    *("tool_calls", "tools", "type"),
}
PICTURE_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".avif"}


def plain(value: Any) -> Any:
    """Returns nested dicts, lists, texts, numbers, booleans and None, which JSON has. Other objects
    become what their `to_dict` returns, or a short text; numbers that are not finite become
    None."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(own) for key, own in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(own) for own in value]
    if isinstance(value, PurePath):
        return str(value)
    to_dict = getattr(value, "to_dict", None)
    return plain(to_dict()) if callable(to_dict) else shown(value)


def name_of(item: Any) -> str:
    """Returns the names of a prompt's media, else its text, else a short repr."""
    media = _media_of(item)
    if media:
        more = f" and {len(media) - MAX_MEDIA} more" if len(media) > MAX_MEDIA else ""
        return ", ".join(cut(str(own)) for own in media[:MAX_MEDIA]) + more
    text = item.get("prompt") if isinstance(item, Mapping) else item
    return cut(text) if isinstance(text, str) else shown(item)


def lines_of(head: str, answers: Sequence[str], counts: str) -> str:
    """Returns three lines: what was asked, what was answered, what it took."""
    return "\n".join([head, *(f"  {own}" for own in answers[:MAX_MEDIA]), f"  {counts}"])


def cut(text: str) -> str:
    """Returns the beginning of a text."""
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "..."


def told(title: str, facts: Mapping[str, str]) -> str:
    """Returns a title and a line for each fact."""
    return "\n".join([title, *(f"  {name}: {words}" for name, words in facts.items())])


def table_of(title: str, facts: Mapping[str, str]) -> str:
    """Returns the same as a table of HTML, for notebooks."""
    rows = "".join(
        f'<tr><td style="text-align:left">{html.escape(name)}</td>'
        f'<td style="text-align:left;white-space:pre-wrap">{html.escape(words)}</td></tr>'
        for name, words in facts.items()
    )
    style = "text-align:left;white-space:nowrap"
    head = f'<caption style="{style}"><code>{html.escape(title)}</code></caption>'
    return f"<table>{head}<tbody>{rows}</tbody></table>"


def html_of(item: Any, answers: Iterable[str], counts: str) -> str:
    """Returns a fragment for notebooks: pictures of the item, answers in HTML and counts. Pictures
    that the item names by a relative path are loaded by the browser, others only from what the
    output holds of them."""
    pictures = "".join(_picture(own) for own in _media_of(item)[:MAX_MEDIA])
    return (
        '<div style="display:flex;gap:1em;align-items:flex-start;margin:.3em 0">'
        f'<div>{pictures}</div><div style="max-width:50em">{"".join(answers)}'
        f'<div style="opacity:.65;font-size:85%">{html.escape(name_of(item)[:MAX_TEXT])}'
        f"<br>{html.escape(counts)}</div></div></div>"
    )


def html_of_answer(
    text: str, *, error: str | None, reasoning: str | None, calls: Iterable[str]
) -> str:
    """Returns an answer in HTML; all texts are escaped."""
    found = f'<div style="white-space:pre-wrap">{html.escape(text)}</div>'
    if error is not None:
        found += f'<div style="color:#c0392b">{html.escape(error)}</div>'
    if reasoning:
        found = (
            '<details><summary style="opacity:.65">reasoning</summary>'
            f'<div style="white-space:pre-wrap;opacity:.65">{html.escape(reasoning)}</div>'
            f"</details>{found}"
        )
    for call in calls:
        found += f"<div><code>{html.escape(call)}</code></div>"
    return found


def _picture(value: Any) -> str:
    thumbnail = getattr(value, "thumbnail", None)
    style = 'style="max-width:160px;max-height:160px;display:block;margin-bottom:4px"'
    if isinstance(thumbnail, bytes):
        data = base64.b64encode(thumbnail).decode()
        return f'<img {style} src="data:image/jpeg;base64,{data}">'
    if isinstance(value, (str, PurePath)) and _is_relative_picture(str(value)):
        source = html.escape(str(value), quote=True)
        return f'<img {style} loading="lazy" src="{source}" alt="{source}">'
    if not isinstance(value, (str, PurePath)):
        return f'<div style="opacity:.65;max-width:160px">{html.escape(repr(value))}</div>'
    return ""


def _is_relative_picture(name: str) -> bool:
    path = PurePath(name)
    return not path.is_absolute() and ":" not in name and path.suffix.lower() in PICTURE_SUFFIXES


def _media_of(item: Any) -> list[Any]:
    """Returns the media of a prompt or conversation, as names or as what was kept of them."""
    found: list[Any] = []
    if isinstance(item, Mapping):
        for key, value in item.items():
            if key not in NO_MEDIA and not (key == "content" and isinstance(value, str)):
                found += [value] if isinstance(value, (str, PurePath)) else _media_of(value)
    elif isinstance(item, (list, tuple)) and not (item and isinstance(item[0], int)):
        for value in item:
            is_name = isinstance(value, (str, PurePath))
            found += [value] if is_name else _media_of(value)
    elif hasattr(item, "form"):
        found.append(item)
    return found
