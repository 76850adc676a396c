"""Tables: read from HTML, from pipes and from cells, written as HTML or with pipes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from html.parser import HTMLParser

MAX_CELLS = 100_000  # of a table: spans may say anything
TABLE = re.compile(r"<table\b.*?</table\s*>", re.DOTALL | re.IGNORECASE)
PIPES = re.compile(
    r"^\|?[^\n|]*\|[^\n]*\n[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$"
    r"(?:\n[^\n]*\|[^\n]*)*",
    re.MULTILINE,
)
FENCED = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.DOTALL | re.MULTILINE)
BAR = re.compile(r"(?<!\\)\|")
INLINE = frozenset(("b", "i", "em", "strong", "sub", "sup", "u", "s", "code", "br", "span", "p"))
KEPT = frozenset(("sub", "sup", "b", "i", "em", "strong", "u", "s", "code"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cell. rows, columns: that it spans. text: Markdown, as a model writes it."""

    text: str
    rows: int = 1
    columns: int = 1
    is_header: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table: the cells that begin in each row, from left to right."""

    rows: tuple[tuple[Cell, ...], ...]

    def grid(self) -> list[list[str]]:
        """Returns the texts by row and column; a cell that spans several stands in its first.
        Raises ValueError for one whose cells overlap, or that is too large."""
        found: dict[tuple[int, int], str] = {}
        width = 0
        for top, row in enumerate(self.rows):
            left = 0
            for cell in row:
                while (top, left) in found:
                    left += 1
                if len(found) + cell.rows * cell.columns > MAX_CELLS:
                    raise ValueError(f"the table has more than {MAX_CELLS} cells")
                for place in _places(top, left, cell):
                    if place in found:
                        raise ValueError("cells of the table overlap")
                    found[place] = ""
                found[top, left] = cell.text
                left += cell.columns
                width = max(width, left)
        height = max((top + 1 for top, _ in found), default=0)
        return [[found.get((top, left), "") for left in range(width)] for top in range(height)]

    def to_markdown(self) -> str:
        """Returns the table with pipes; its first row is the header, as Markdown wants one."""
        grid = [[_one_line(text) for text in row] for row in self.grid()]
        if not grid or not grid[0]:
            return ""
        lines = [f"| {' | '.join(row)} |" for row in grid]
        return "\n".join([lines[0], f"|{' --- |' * len(grid[0])}", *lines[1:]])

    def to_html(self) -> str:
        """Returns the table as HTML, one line for each row."""
        lines = ["<table>"]
        for row in self.rows:
            cells = []
            for cell in row:
                name = "th" if cell.is_header else "td"
                spans = f' rowspan="{cell.rows}"' if cell.rows > 1 else ""
                spans += f' colspan="{cell.columns}"' if cell.columns > 1 else ""
                cells.append(f"<{name}{spans}>{_html_text(cell.text)}</{name}>")
            lines.append(f"<tr>{''.join(cells)}</tr>")
        return "\n".join([*lines, "</table>"])

    def written(self, how: str) -> str:
        """Returns the table as "html" or "markdown"."""
        return self.to_html() if how == "html" else self.to_markdown()


def _places(top: int, left: int, cell: Cell) -> list[tuple[int, int]]:
    return [
        (row, column)
        for row in range(top, top + cell.rows)
        for column in range(left, left + cell.columns)
    ]


def _one_line(text: str) -> str:
    """Returns the text of a cell as a cell between pipes can have it."""
    return BAR.sub(r"\\|", re.sub(r"\s*\n\s*", "<br>", text.strip()))


def _html_text(text: str) -> str:
    """Returns the text of a cell as HTML; the few tags that cells have stay."""
    whole = escape(text.strip(), quote=False).replace("\n", "<br>")
    return re.sub(rf"&lt;(/?(?:{'|'.join(sorted(KEPT))}|br)\s*/?)&gt;", r"<\1>", whole)


def tables_as(text: str, how: str) -> tuple[str, tuple[str, ...]]:
    """Returns Markdown with its tables as "html" or "markdown", and what could not be changed.
    Tables inside of fenced code stay."""
    notes: list[str] = []

    def changed(pattern: re.Pattern[str], read: Callable[[str], Table], piece: str) -> str:
        def one(match: re.Match[str]) -> str:
            try:
                return read(match[0]).written(how)
            except ValueError as error:
                notes.append(f"a table stays as it was written: {error}")
                return match[0]

        return pattern.sub(one, piece)

    pattern, read = (PIPES, read_pipes) if how == "html" else (TABLE, read_html)
    found, end = [], 0
    for fence in FENCED.finditer(text):
        found += [changed(pattern, read, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*found, changed(pattern, read, text[end:])]), tuple(notes)


def read_pipes(text: str) -> Table:
    """Reads a table with pipes, whose second line is the rule."""
    lines = text.strip().splitlines()
    rows = [_cells_of(line) for line in (lines[0], *lines[2:])]
    return Table(
        rows=tuple(
            tuple(Cell(text=cell, is_header=number == 0) for cell in row)
            for number, row in enumerate(rows)
        )
    )


def _cells_of(line: str) -> list[str]:
    inner = line.strip().removeprefix("|")
    parts = BAR.split(inner)
    if len(parts) > 1 and not parts[-1].strip():
        parts.pop()
    return [re.sub(r"<br\s*/?>", "\n", part.strip().replace("\\|", "|")) for part in parts]


def read_html(text: str) -> Table:
    """Reads an HTML table. Raises ValueError for one in another, and for one without cells."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    reader.end_cell()
    if not any(reader.rows):
        raise ValueError("it has no cells")
    return Table(rows=tuple(tuple(row) for row in reader.rows if row or len(reader.rows) > 1))


class _Reader(HTMLParser):
    """Collects the cells of one HTML table."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.rows: list[list[Cell]] = []
        self._depth = 0
        self._open: tuple[str, int, int] | None = None
        self._texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        if tag == "table":
            self._depth += 1
            if self._depth > 1:
                raise ValueError("it has a table in a cell")
        elif tag == "tr":
            self.end_cell()
            self.rows.append([])
        elif tag in ("td", "th"):
            self.end_cell()
            if not self.rows:
                self.rows.append([])
            spans = dict(attrs)
            self._open = (tag, _span(spans.get("rowspan")), _span(spans.get("colspan")))
        elif tag == "br":
            self._texts.append("\n")
        elif tag in KEPT and self._open:
            self._texts.append(f"<{tag}>")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th", "tr", "table"):
            self.end_cell()
            self._depth -= tag == "table"
        elif tag in KEPT and self._open:
            self._texts.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        if self._open:
            self._texts.append(data)
        elif data.strip():
            raise ValueError("it has text outside of cells")

    def end_cell(self) -> None:
        """Adds the cell that is open to its row."""
        if self._open is not None:
            tag, rows, columns = self._open
            text = "".join(self._texts).strip()
            cell = Cell(text=text, rows=rows, columns=columns, is_header=tag == "th")
            self.rows[-1].append(cell)
        self._open, self._texts = None, []


def _span(text: str | None) -> int:
    """Reads a span. Raises ValueError for one that is none."""
    if text is None:
        return 1
    if not text.strip().isdigit() or not 1 <= int(text) <= 1000:
        raise ValueError(f"it has the span {text[:20]!r}")
    return int(text)
