"""DocTags, in which the models of Docling answer, as Markdown.

docling-core reads them too, with 20 packages of its own; these are the tags of a page, no more. A
tag without an end is closed where its parent ends, since answers are cut off at their limit; an end
without a begin is malformed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mmdeploy_llm.hooks import ReadPage

from . import blocks
from .cells import read_cells

TAG = re.compile(r"<(/?)([a-z][a-z0-9_]*)>")
PLACES = re.compile(r"(?:<loc_\d{1,4}>)+")
NUMBERS = re.compile(r"<loc_(\d{1,4})>")
LANGUAGE = re.compile(r"\A\s*<_([^<>\n]{1,40})_>")
LEVEL = re.compile(r"section_header_level_(\d)\Z")
CELLS = frozenset(("fcel", "ecel", "ched", "rhed", "srow", "lcel", "ucel", "xcel", "nl"))
# Tags without an end.
SINGLE = frozenset(("page_break",))
CONTAINERS = frozenset(("doctag", "document", "group", "inline", "key_value_region"))
LISTS = frozenset(("unordered_list", "ordered_list"))
TEXTS = frozenset(("text", "paragraph", "caption", "footnote", "reference", "handwritten_text"))
TABLES = frozenset(("otsl", "chart"))
PICTURES = frozenset(("picture", "bar_chart", "line_chart", "pie_chart", "flow_chart"))
OTHERS = ("title", "list_item", "formula", "code", "page_header", "page_footer", "document_index")
BOXES = ("checkbox_selected", "checkbox_unselected", "form", "smiles", "logo", "other")
KNOWN = CONTAINERS | LISTS | TEXTS | TABLES | PICTURES | {*OTHERS, *BOXES}
MAX_DEPTH = 64


@dataclass(slots=True)
class _Node:
    """A tag, with texts and tags in it."""

    name: str
    parts: list[str | _Node] = field(default_factory=list)

    def text(self) -> str:
        """Returns its texts, without the places."""
        found = (part if isinstance(part, str) else part.text() for part in self.parts)
        return PLACES.sub("", "".join(found)).strip()

    def place(self) -> list[int] | None:
        """Returns the first four numbers of its own places."""
        own = "".join(part for part in self.parts if isinstance(part, str))
        numbers = [int(number) for number in NUMBERS.findall(own)[:4]]
        return numbers if len(numbers) == 4 else None

    def inner(self) -> Iterator[_Node]:
        """Yields the tags in it."""
        return (part for part in self.parts if isinstance(part, _Node))


def to_markdown(text: str, page: ReadPage) -> str:
    """Returns a page as Markdown. Raises ValueError for one without tags, and for malformed
    ones."""
    if not any(_is_known(own[2]) for own in TAG.finditer(text)):
        raise ValueError("the answer has no DocTags")
    return blocks.joined(list(_blocks(_tree(text), page)))


def _is_known(name: str) -> bool:
    return name in KNOWN or name in SINGLE or LEVEL.match(name) is not None


def _tree(text: str) -> _Node:
    root = _Node("doctag")
    stack, end = [root], 0
    for match in TAG.finditer(text):
        name = match[2]
        if not _is_known(name) or name in CELLS:
            continue  # a part of the text
        stack[-1].parts.append(text[end : match.start()])
        end = match.end()
        if name in SINGLE:
            continue
        if not match[1]:
            if len(stack) > MAX_DEPTH:
                raise ValueError(f"tags are nested more than {MAX_DEPTH} times")
            node = _Node(name)
            stack[-1].parts.append(node)
            stack.append(node)
            continue
        open_names = [node.name for node in stack[1:]]
        if name not in open_names:
            raise ValueError(f"</{name}> ends nothing")
        while stack.pop().name != name:
            pass
    stack[-1].parts.append(text[end:])
    return root


def _blocks(node: _Node, page: ReadPage) -> Iterator[str]:
    for part in node.parts:
        if isinstance(part, str):
            yield PLACES.sub("", part).strip()
        elif part.name in CONTAINERS:
            yield from _blocks(part, page)
        else:
            yield _block(part, page)


def _block(node: _Node, page: ReadPage) -> str:
    if node.name in LISTS:
        return _list(node, page)
    if node.name in TABLES or node.name == "document_index":
        return _table(node, page)
    if node.name in PICTURES:
        return _picture(node, page)
    if level := LEVEL.match(node.name):
        return blocks.heading(node.text(), int(level[1]) + 1)
    write: Callable[[str], str] = {
        "title": lambda text: blocks.heading(text, 1),
        "formula": blocks.formula,
        "code": _code,
        "page_header": lambda text: blocks.comment(f"page header: {text}"),
        "page_footer": lambda text: blocks.comment(f"page footer: {text}"),
        "list_item": lambda text: f"- {text}",
        "checkbox_selected": lambda text: f"- [x] {text}",
        "checkbox_unselected": lambda text: f"- [ ] {text}",
    }.get(node.name, str)
    return write(node.text())


def _list(node: _Node, page: ReadPage) -> str:
    lines = []
    for number, item in enumerate(node.inner(), 1):
        if item.name != "list_item":
            inner = _block(item, page)
            lines += [f"  {line}" for line in inner.splitlines()]
            continue
        mark = f"{number}." if node.name == "ordered_list" else "-"
        own = _Node("item", [part for part in item.parts if isinstance(part, str)]).text()
        lines.append(f"{mark} {' '.join(own.split())}")
        for deeper in item.inner():
            lines += [f"  {line}" for line in _block(deeper, page).splitlines()]
    return "\n".join(lines)


def _table(node: _Node, page: ReadPage) -> str:
    cells = _Node("cells", [part for part in node.parts if isinstance(part, str)]).text()
    others = [_block(inner, page) for inner in node.inner()]
    found = blocks.table(read_cells(cells), page.tables) if cells else ""
    return blocks.joined([*others, found])


def _picture(node: _Node, page: ReadPage) -> str:
    inner = [_block(own, page) for own in node.inner()]
    own = _Node("own", [part for part in node.parts if isinstance(part, str)]).text()
    return blocks.joined([blocks.picture(node.place()), own, *inner])


def _code(text: str) -> str:
    language = LANGUAGE.match(text)
    name = "" if language is None else language[1].lower()
    return blocks.code(LANGUAGE.sub("", text), "" if name == "unknown" else name)
