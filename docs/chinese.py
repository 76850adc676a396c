"""The Chinese pages of the guide: `X.zh.md` beside `X.md`.

A Chinese page has the sections of the English one in the same order, each with the same code
blocks and figures, as many rows of tables, every name in backticks and every link. `differences`
says what is missing; `python docs/hooks.py` copies the blocks. A section that nobody has translated
yet holds the comment `<!-- the English section -->` and a link: the site shows the English text in
its place, and says so.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

ENDING = ".zh.md"
FOLDER = "zh/"
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^(#+) (.*)\n", re.MULTILINE)
ROW = re.compile(r"^\|", re.MULTILINE)
NAME = re.compile(r"`[^`\n]+`")
FIGURE = re.compile(r"(?<![\w.])\d+(?:\.\d+)+(?![\w.]*\w)|\d{4}-\d\d-\d\d", re.ASCII)
LINK = re.compile(r"\]\(([^)#]*)[^)]*\)")
GENERATED = re.compile(r"<!-- table: .*?<!-- end of table -->", re.DOTALL)
ANCHOR = re.compile(r"\]\(#([^)]+)\)")
BORROWED = "<!-- the English section -->"
NOTE = '\n!!! note "本节还没有翻译，下面是英文原文"\n\n'
MARK = '{: .english title="英文页面" }'


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading with the text up to the next one. level: 1 for the title of a page."""

    level: int
    title: str
    text: str

    @property
    def is_borrowed(self) -> bool:
        """Says whether the site shows the English text here."""
        return self.text.lstrip().startswith(BORROWED)

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
    def links(self) -> set[str]:
        """Returns the files that it links to, Chinese ones by their English names."""
        return {english(link) for link in LINK.findall(prose(self.text)) if link}

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


def pairs(page: str, original: str) -> Iterator[tuple[Section | None, list[Section]]]:
    """Yields each Chinese section with the English ones that it stands for: one, or for a borrowed
    section all beneath it too. None: the Chinese page has ended."""
    left = sections(original)
    for own in sections(page):
        count = 1
        while own.is_borrowed and left[count:] and left[count].level > own.level:
            count += 1
        yield own, left[:count]
        left = left[count:]
    if left:
        yield None, left


def differences(page: str, original: str) -> list[str]:
    """Says what a Chinese page lacks, or has too much."""
    return [problem for own, theirs in pairs(page, original) for problem in _problems(own, theirs)]


def _problems(own: Section | None, theirs: list[Section]) -> Iterator[str]:
    """Yields what differs between a section and its original."""
    if own is None or not theirs or own.level != theirs[0].level:
        mine = f'"{own.title}"' if own else "the end of the page"
        yield f'{mine} stands where the English page has "{theirs[0].title if theirs else "ended"}"'
        return
    if own.is_borrowed:
        return
    where = f'"{own.title}" ("{theirs[0].title}" in English)'
    if own.blocks != theirs[0].blocks:
        yield f"{where}: other code blocks; run: python docs/hooks.py"
    if own.tables != theirs[0].tables:
        yield f"{where}: other generated tables; run: python docs/hooks.py"
        return
    if own.rows != theirs[0].rows:
        yield f"{where}: {own.rows} rows of tables instead of {theirs[0].rows}"
    if missing := sorted(theirs[0].links - own.links):
        yield f"{where}: has no link to {', '.join(missing)}"
    if other := sorted(theirs[0].figures ^ own.figures):
        yield f"{where}: other figures: {', '.join(other)}"
    if missing := sorted(theirs[0].names - own.names):
        yield f"{where}: says nothing about {', '.join(missing)}"


def copy_blocks(page: str, original: str) -> str:
    """Returns a Chinese page with the code blocks of the English one. Raises ValueError where a
    section has another number of them."""
    found = []
    for own, theirs in pairs(page, original):
        if own is None or not theirs:
            raise ValueError("; ".join(differences(page, original)))
        text = own.text
        if not own.is_borrowed:
            if len(own.blocks) != len(theirs[0].blocks):
                raise ValueError(f'"{own.title}" has not the code blocks of the English section')
            blocks = iter(theirs[0].blocks)
            text = FENCE.sub(lambda _, blocks=blocks: next(blocks), text)  # type: ignore[misc]
        found.append(f"{'#' * own.level} {own.title}\n{text}")
    return "".join(found)


def expand(page: str, original: str) -> str:
    """Returns a Chinese page with the English text of the sections that are not translated."""
    both = [(own, theirs) for own, theirs in pairs(page, original) if own]
    anchors = {slug(theirs[0].title): slug(own.title) for own, theirs in both}

    def anchored(text: str) -> str:
        return ANCHOR.sub(lambda match: f"](#{anchors.get(match[1], match[1])})", text)

    found = []
    for own, theirs in both:
        if own.is_borrowed:
            first, *rest = theirs
            text = NOTE + anchored(first.text + "".join(map(str, rest)))
            found.append(f"{'#' * own.level} {own.title}\n{text}")
        else:
            found.append(str(own))
    return "".join(found)


def slug(title: str) -> str:
    """Returns the anchor of a heading, as the site makes it (toc's slugify_unicode); GitHub's are
    the same."""
    text = re.sub(r"[^\w\s-]", "", unicodedata.normalize("NFKC", title)).strip().lower()
    return re.sub(r"[-\s]+", "-", text)
