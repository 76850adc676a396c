"""Cells of OTSL, the language of tables of several OCR models, as a table.

<fcel>a<fcel>b<nl>          a cell with text; <ecel> one without, <ched> and <rhed> headers of
<fcel>c<lcel><nl>           columns and rows, <srow> of a section; <lcel> belongs to the cell on
                            its left, <ucel> to the one above it, <xcel> to both
"""

from __future__ import annotations

import re

from .tables import MAX_CELLS, Cell, Table

OWN = ("fcel", "ecel", "ched", "rhed", "srow")
MERGED = ("lcel", "ucel", "xcel")
TOKEN = re.compile(rf"<({'|'.join((*OWN, *MERGED, 'nl'))})>")
# A run of cells in another text: tokens, the texts of cells, and the end of the last row.
RUN = re.compile(rf"(?:<(?:{'|'.join((*OWN, *MERGED))})>[^<\n]*|<nl>\s*)+")


def read_cells(text: str) -> Table:
    """Reads a table. Raises ValueError for rows of several lengths, and for cells that belong to
    none."""
    rows: list[list[tuple[str, str]]] = [[]]
    parts = TOKEN.split(text)
    if parts[0].strip():
        raise ValueError("text stands before the first cell")
    for kind, content in zip(parts[1::2], parts[2::2], strict=True):
        if kind == "nl":
            if content.strip():
                raise ValueError("text stands between two rows")
            rows.append([])
        else:
            rows[-1].append((kind, content.strip()))
    if not rows[-1]:
        rows.pop()
    widths = {len(row) for row in rows}
    if len(widths) != 1 or 0 in widths:
        raise ValueError(f"the rows have {', '.join(map(str, sorted(widths)))} cells")
    if sum(map(len, rows)) > MAX_CELLS:
        raise ValueError(f"the table has more than {MAX_CELLS} cells")
    return Table(rows=tuple(_cells_of(rows, top) for top in range(len(rows))))


def _cells_of(rows: list[list[tuple[str, str]]], top: int) -> tuple[Cell, ...]:
    """Returns the cells that begin in a row."""
    found = []
    for left, (kind, text) in enumerate(rows[top]):
        if kind in MERGED:
            _check_owner(rows, top, left, kind)
            continue
        columns = rows_of = 1
        while left + columns < len(rows[top]) and rows[top][left + columns][0] == "lcel":
            columns += 1
        while top + rows_of < len(rows) and rows[top + rows_of][left][0] == "ucel":
            rows_of += 1
        is_header = kind in ("ched", "rhed", "srow")
        found.append(Cell(text=text, rows=rows_of, columns=columns, is_header=is_header))
    return tuple(found)


def _check_owner(rows: list[list[tuple[str, str]]], top: int, left: int, kind: str) -> None:
    """Raises ValueError for a merged cell that belongs to no other."""
    beside = rows[top][left - 1][0] if left else None
    above = rows[top - 1][left][0] if top else None
    owners = {
        "lcel": beside in (*OWN, "lcel"),
        "ucel": above in (*OWN, "ucel"),
        "xcel": beside in ("ucel", "xcel") and above in ("lcel", "xcel"),
    }
    if not owners[kind]:
        raise ValueError(f"the cell <{kind}> in row {top + 1} belongs to no other")
