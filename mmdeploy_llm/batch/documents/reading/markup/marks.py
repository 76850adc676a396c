"""Answers that are Markdown but for a few marks: places, cells, fences, front matter."""

from __future__ import annotations

import re

from mmdeploy_llm.hooks import ReadPage, ReadText

from . import blocks
from .cells import RUN, read_cells

PLACED = re.compile(r"<\|ref\|>(.*?)<\|/ref\|>\s*(?:<\|det\|>(.*?)<\|/det\|>)?[ \t]*\n?", re.DOTALL)
FRONT = re.compile(r"\A\s*---[ \t]*\n(.*?)\n---[ \t]*(?:\n|\Z)", re.DOTALL)
LABELS = frozenset(
    (
        *("title", "sub_title", "text", "table", "equation", "formula", "code", "list"),
        *("image", "figure", "picture", "chart", "reference", "image_caption", "table_caption"),
        *("table_footnote", "header", "footer", "page_number"),
    )
)
PICTURES = frozenset(("image", "figure", "picture", "chart"))


def plain(text: str, page: ReadPage) -> str:
    """Returns an answer without the fences around it; a formula in a block of its own."""
    found = blocks.unfenced(text)
    return blocks.formula(found) if page.task == "formula" and found.strip() else found


def placed(text: str, page: ReadPage) -> str:
    """Returns an answer in which <|ref|>kind<|/ref|><|det|>[[place]]<|/det|> stands before each
    block: the text of the blocks, and comments for pictures. Raises
    ValueError for a mark without an end."""
    found = PLACED.sub(_mark, text)
    if "<|ref|>" in found or "<|det|>" in found:
        raise ValueError("a mark of a place has no end")
    return blocks.unfenced(found)


def _mark(match: re.Match[str]) -> str:
    kind, place = match[1].strip(), (match[2] or "").strip()
    if place and kind in PICTURES:
        return f"{blocks.picture(place)}\n"
    return "" if place and kind in LABELS else f"{kind}\n"  # what else is marked is text


def cells(text: str, page: ReadPage) -> ReadText:
    """Returns an answer whose tables are cells."""
    notes: list[str] = []

    def one(match: re.Match[str]) -> str:
        try:
            return f"\n\n{blocks.table(read_cells(match[0]), page.tables)}\n\n"
        except ValueError as error:
            notes.append(f"a table stays as it was written: {error}")
            return match[0]

    return ReadText(text=RUN.sub(one, plain(text, page)).strip(), notes=tuple(notes))


def front_matter(text: str, page: ReadPage) -> ReadText:
    """Returns an answer without the values before it; they stand in a comment, and a page
    that the model calls turned is told."""
    match = FRONT.match(text)
    if match is None:
        if page.task == "page":
            raise ValueError("the answer does not begin with its values between ---")
        return ReadText(text=text)
    lines = [line.strip() for line in match[1].splitlines() if line.strip()]
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    rotation = values.get("rotation_correction", "0").strip()
    is_turned = values.get("is_rotation_valid", "true").strip().lower() == "false"
    notes = [f"the model calls the page turned, by {rotation} degrees"] if is_turned else []
    body = text[match.end() :].strip()
    return ReadText(
        text=blocks.joined([blocks.comment("; ".join(lines)), body]), notes=tuple(notes)
    )
