"""Blocks of a page as Markdown: what all converters write alike."""

from __future__ import annotations

import re

from .tables import Table

COMMENT_END = re.compile(r"--+>?")
FORMULA = re.compile(r"^\s*(?:\$\$(.*)\$\$|\\\[(.*)\\\])\s*$", re.DOTALL)
FENCE = re.compile(r"\A\s*```(?:markdown|md|html|latex|json)?[ \t]*\n(.*?)\n?```\s*\Z", re.DOTALL)


def comment(text: str) -> str:
    """Returns a comment, which renderers do not show; dashes that would end it are parted."""
    return f"<!-- {COMMENT_END.sub(lambda own: ' '.join(own[0]), text.strip())} -->"


def heading(text: str, level: int) -> str:
    """Returns a heading; one that has marks of its own stays."""
    line = " ".join(text.split())
    return line if line.startswith("#") else f"{'#' * min(max(level, 1), 6)} {line}"


def formula(text: str) -> str:
    """Returns a formula in LaTeX, in a block of its own."""
    match = FORMULA.match(text)
    inner = text if match is None else match[1] if match[1] is not None else match[2]
    return f"$$\n{inner.strip()}\n$$"


def code(text: str, language: str = "") -> str:
    """Returns code between fences that are longer than any in it."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text.strip(chr(10))}\n{fence}"


def table(found: Table, how: str) -> str:
    """Returns a table as "html" or "markdown"."""
    return found.written(how)


def picture(box: object = None, text: str = "") -> str:
    """Returns the mark of a picture. box: its place on the page. text: what a model says of it."""
    place = "" if box is None else f" {box}"
    mark = comment(f"picture{place}")
    return f"{mark}\n{text.strip()}" if text.strip() else mark


def joined(blocks: list[str]) -> str:
    """Returns blocks with blank lines between them."""
    return "\n\n".join(block.strip("\n") for block in blocks if block.strip())


def unfenced(text: str) -> str:
    """Returns what stands between fences, where a whole answer does; else the answer."""
    match = FENCE.match(text)
    return text if match is None or "```" in match[1] else match[1]
