"""The Chinese pages of the guide: `X.zh.md` beside `X.md`.

A Chinese page has the sections of the English one in the same order, each with the same code
blocks and figures, as many rows of tables, every name in backticks and every link. `differences`
says what is missing; `python docs/hooks.py` copies the blocks and the generated tables.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

ENDING = ".zh.md"
FOLDER = "zh/"
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^(#+) (.*)\n", re.MULTILINE)
ROW = re.compile(r"^\|", re.MULTILINE)
NAME = re.compile(r"`[^`\n]+`")
FIGURE = re.compile(r"(?<![\w.])\d+(?:\.\d+)+(?![\w.]*\w)|\d{4}-\d\d-\d\d", re.ASCII)
LINK = re.compile(r"\]\(([^)#]*)[^)]*\)")
GENERATED = re.compile(
    r"<!-- table: .*?<!-- end of table -->"
    r"|<!-- architectures: begin -->.*?<!-- architectures: end -->",
    re.DOTALL,
)
MARK = '{: .english title="英文页面" }'


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading with the text up to the next one. level: 1 for the title of a page."""

    level: int
    title: str
    text: str

    @property
    def blocks(self) -> list[str]:
        """Returns the code blocks."""
        return FENCE.findall(self.text)

    @property
    def tables(self) -> list[str]:
        """Returns the generated tables."""
        return GENERATED.findall(self.text)

    @property
    def rows(self) -> int:
        """Counts the rows of tables."""
        return len(ROW.findall(prose(self.text)))

    @property
    def names(self) -> set[str]:
        """Returns what stands in backticks, outside of generated tables."""
        return set(NAME.findall(GENERATED.sub("", prose(self.text))))

    @property
    def links(self) -> Counter[str]:
        """Counts the links to each file, to Chinese ones by their English names."""
        return Counter(english(link) for link in LINK.findall(prose(self.text)) if link)

    @property
    def figures(self) -> set[str]:
        """Returns the numbers with a point, such as versions and ratios, and the dates."""
        return set(FIGURE.findall(LINK.sub("", GENERATED.sub("", prose(self.text)))))

    def __str__(self) -> str:
        return f"{'#' * self.level} {self.title}\n{self.text}"


def english(origin: str) -> str:
    """Returns the English file of a Chinese one."""
    return f"{origin.removesuffix(ENDING)}.md" if origin.endswith(ENDING) else origin


def chinese(origin: str) -> str:
    """Returns the Chinese file of an English one, which may not exist."""
    return origin.removesuffix(".md") + ENDING


def prose(text: str) -> str:
    """Returns a text without its code blocks."""
    return "".join(FENCE.split(text)[::2])


def sections(text: str) -> list[Section]:
    """Splits a page at its headings; a line of code that begins with # is none."""
    code = FENCE.findall(text)
    parts = HEADING.split("".join(FENCE.sub("\0", text)))
    assert not parts[0].strip(), "a page begins with its title"
    blocks = iter(code)
    fill = [re.sub("\0", lambda _: next(blocks), part) for part in parts[1:]]
    return [
        Section(level=len(marks), title=title, text=body)
        for marks, title, body in zip(fill[::3], fill[1::3], fill[2::3], strict=True)
    ]


def differences(page: str, original: str) -> list[str]:
    """Says what a Chinese page lacks, or has too much."""
    both = zip_longest(sections(page), sections(original))
    return [problem for own, theirs in both for problem in _problems(own, theirs)]


def _problems(own: Section | None, theirs: Section | None) -> Iterator[str]:
    """Yields what differs between a section and its original; None: the page has ended."""
    if own is None or theirs is None or own.level != theirs.level:
        mine = f'"{own.title}"' if own else "the end of the page"
        yield f'{mine} stands where the English page has "{theirs.title if theirs else "ended"}"'
        return
    where = f'"{own.title}" ("{theirs.title}" in English)'
    if own.blocks != theirs.blocks:
        yield f"{where}: other code blocks; run: python docs/hooks.py"
    if own.tables != theirs.tables:
        yield f"{where}: other generated tables; run: python docs/hooks.py"
        return
    if own.rows != theirs.rows:
        yield f"{where}: {own.rows} rows of tables instead of {theirs.rows}"
    if missing := sorted(theirs.links - own.links):
        yield f"{where}: lacks a link to {', '.join(missing)}"
    if other := sorted(theirs.figures ^ own.figures):
        yield f"{where}: other figures: {', '.join(other)}"
    if missing := sorted(theirs.names - own.names):
        yield f"{where}: says nothing about {', '.join(missing)}"


def copy_blocks(page: str, original: str) -> str:
    """Returns a Chinese page with the code blocks and generated tables of the English one. Raises
    ValueError where a section has another number of them."""
    found = []
    for own, theirs in zip_longest(sections(page), sections(original)):
        if own is None or theirs is None:
            raise ValueError("; ".join(differences(page, original)))
        where = f'"{own.title}" has not the'
        text = _copied(FENCE, own.text, theirs.text, f"{where} code blocks of the English section")
        text = _copied(GENERATED, text, theirs.text, f"{where} tables of the English section")
        found.append(f"{'#' * own.level} {own.title}\n{text}")
    return "".join(found)


def _copied(part: re.Pattern[str], text: str, original: str, problem: str) -> str:
    """Returns a text with the parts of its original that match a pattern."""
    found = iter(part.findall(original))
    if len(part.findall(text)) != len(part.findall(original)):
        raise ValueError(problem)
    return part.sub(lambda _: next(found), text)
