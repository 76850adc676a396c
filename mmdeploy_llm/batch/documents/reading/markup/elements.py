"""Answers that are JSON: the elements of a page in reading order, each with its place, category and
text, as Markdown."""

from __future__ import annotations

import json
from typing import Any

from mmdeploy_llm.hooks import ReadPage

from . import blocks
from .tables import TABLE, read_html

LISTS = ("elements", "layout", "items", "result")  # keys under which an object has its list


def to_markdown(text: str, page: ReadPage) -> str:
    """Returns a page as Markdown. Raises ValueError for an answer that is not such JSON."""
    if page.task != "page":
        return text
    try:
        found = json.loads(blocks.unfenced(text))
    except (ValueError, RecursionError):
        raise ValueError("the answer is not JSON, or was cut off in it") from None
    if isinstance(found, dict):
        named = next((found[name] for name in LISTS if name in found), [found])
        found = named
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ValueError("the answer is no list of elements")
    return blocks.joined([_block(one, page) for one in found])


def _block(element: dict[str, Any], page: ReadPage) -> str:
    category, text = str(element.get("category", "Text")), element.get("text", "")
    if not isinstance(text, str):
        raise ValueError(f"an element has a text that is {type(text).__name__}")
    match category:
        case "Title":
            return blocks.heading(text, 1)
        case "Section-header":
            return blocks.heading(text, 2)
        case "List-item":
            has_mark = text.lstrip().startswith(("-", "*", "+")) or _has_number(text)
            return text if has_mark else f"- {text}"
        case "Formula":
            return blocks.formula(text)
        case "Table" if TABLE.search(text):
            return blocks.table(read_html(text), page.tables)
        case "Picture":
            return blocks.picture(element.get("bbox"), text)
        case "Page-header" | "Page-footer":
            return blocks.comment(f"{category.lower().replace('-', ' ')}: {text}")
    return text


def _has_number(text: str) -> bool:
    first = text.split(maxsplit=1)[0] if text.split() else ""
    return first.rstrip(".)").isalnum() and first.endswith((".", ")"))
