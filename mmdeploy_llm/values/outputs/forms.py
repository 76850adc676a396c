"""Other forms of an output: plain data, a row of a table, three lines of text, HTML."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from mmdeploy_llm.values.text.display import shown

if TYPE_CHECKING:
    from .request_output import CompletionOutput, RequestOutput

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


def row_of(output: RequestOutput) -> dict[str, Any]:
    """Returns the numbers and texts of an output's first completion, none of them nested."""
    first = output.outputs[0]
    return {
        "item": name_of(output.item),
        "text": first.text,
        "reasoning": first.reasoning_content,
        "finish_reason": first.finish_reason,
        "error_code": output.error_code,
        "error_msg": output.error_msg,
        "num_completions": len(output.outputs),
        "num_output_tokens": len(first.token_ids),
        "num_input_tokens": len(output.prompt_token_ids),
        "num_input_image_tokens": output.num_input_image_tokens,
        "num_input_video_tokens": output.num_input_video_tokens,
        "num_cached_tokens": output.num_cached_tokens,
        "seconds": output.metrics.model_execute_time,
        "request_id": output.request_id,
    }


def name_of(item: Any) -> str:
    """Returns the names of a prompt's media, else its text, else a short repr."""
    media = _media_of(item)
    if media:
        more = f" and {len(media) - MAX_MEDIA} more" if len(media) > MAX_MEDIA else ""
        return ", ".join(_cut(str(own)) for own in media[:MAX_MEDIA]) + more
    text = item.get("prompt") if isinstance(item, Mapping) else item
    return _cut(text) if isinstance(text, str) else shown(item)


def lines_of(output: RequestOutput) -> str:
    """Returns three lines: what was asked, what was answered, what it took."""
    heads = [f"RequestOutput({output.request_id!r}, {name_of(output.item)!r})"]
    heads += [f"  {_answer(own)}" for own in output.outputs[:MAX_MEDIA]]
    return "\n".join([*heads, f"  {_counts(output)}"])


def _answer(own: CompletionOutput) -> str:
    if not own.is_ok:
        return f"error {own.error_code}: {_cut(own.error_msg or '')}"
    num = len(own.tool_calls or ())
    calls = f", {num} tool call{'s' * (num > 1)}" if num else ""
    return f"{own.finish_reason or 'unfinished'}: {_cut(own.text)!r}{calls}"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "..."


def _counts(output: RequestOutput) -> str:
    kinds = dict(output.num_input_tokens_by_kind) or {
        "image": output.num_input_image_tokens,
        "video": output.num_input_video_tokens,
    }
    kinds["cached"] = output.num_cached_tokens
    of_which = ", ".join(f"{num:,} {kind}" for kind, num in kinds.items() if num)
    num = sum(len(own.token_ids) for own in output.outputs)
    seconds = output.metrics.model_execute_time
    return (
        f"{len(output.prompt_token_ids):,} prompt tokens{f' ({of_which})' if of_which else ''}, "
        f"{num:,} generated{f', {seconds:.2f} s' if seconds is not None else ''}"
    )


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


def html_of(output: RequestOutput) -> str:
    """Returns a fragment for notebooks: pictures, text, reasoning and counts. All texts are
    escaped; pictures that the item names by a relative path are loaded by the browser, others only
    from what the output holds of them."""
    pictures = "".join(_picture(own) for own in _media_of(output.item)[:MAX_MEDIA])
    answers = "".join(_answer_html(own) for own in output.outputs)
    return (
        '<div style="display:flex;gap:1em;align-items:flex-start;margin:.3em 0">'
        f'<div>{pictures}</div><div style="max-width:50em">{answers}'
        f'<div style="opacity:.65;font-size:85%">{html.escape(name_of(output.item)[:MAX_TEXT])}'
        f"<br>{html.escape(_counts(output))}</div></div></div>"
    )


def _answer_html(own: CompletionOutput) -> str:
    text = f'<div style="white-space:pre-wrap">{html.escape(own.text)}</div>'
    if not own.is_ok:
        told = html.escape(f"error {own.error_code}: {own.error_msg or ''}")
        text += f'<div style="color:#c0392b">{told}</div>'
    if own.reasoning_content:
        shown_reasoning = html.escape(own.reasoning_content)
        text = (
            '<details><summary style="opacity:.65">reasoning</summary>'
            f'<div style="white-space:pre-wrap;opacity:.65">{shown_reasoning}</div></details>{text}'
        )
    for call in own.tool_calls or ():
        text += f"<div><code>{html.escape(f'{call.name}({call.arguments})')}</code></div>"
    return text


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
