"""Tables are read from HTML, pipes and cells, and written as HTML or with pipes; what cannot be
read stays as it is, and is told."""

import pytest

from mmdeploy_llm.batch.documents.reading.markup.cells import read_cells
from mmdeploy_llm.batch.documents.reading.markup.tables import (
    Cell,
    read_html,
    read_pipes,
    tables_as,
)

HTML = "<table><tr><th>a</th><th>b</th></tr><tr><td>1 &lt; 2</td><td>x|y<br>z</td></tr></table>"
PIPES = "| a | b |\n| --- | --- |\n| 1 < 2 | x\\|y<br>z |"


def test_html_becomes_pipes_and_pipes_become_html():
    assert tables_as(f"before\n\n{HTML}\n\nafter", "markdown") == (
        f"before\n\n{PIPES}\n\nafter",
        (),
    )
    back, notes = tables_as(f"before\n\n{PIPES}\n\nafter", "html")
    assert back.replace("\n<tr>", "<tr>").replace("\n</table>", "</table>") == (
        f"before\n\n{HTML}\n\nafter"
    )
    assert notes == ()


def test_merged_cells_stand_in_the_first_of_their_places():
    found = read_html(
        '<table><tr><td rowspan=2>a</td><td colspan="2">b</td></tr><tr><td>c<td>d</table>'
    )
    assert found.grid() == [["a", "b", ""], ["", "c", "d"]]
    assert found.to_html().splitlines()[1] == (
        '<tr><td rowspan="2">a</td><td colspan="2">b</td></tr>'
    )


def test_cells_are_a_table():
    found = read_cells("<ched>a<lcel><nl><fcel>b<ucel><nl>".replace("<ucel>", "<ecel>"))
    assert found.rows == (
        (Cell(text="a", columns=2, is_header=True),),
        (Cell(text="b"), Cell(text="")),
    )
    merged = read_cells("<fcel>a<lcel><fcel>c<nl><ucel><xcel><fcel>d<nl>")
    assert merged.rows[0][0] == Cell(text="a", rows=2, columns=2)
    assert merged.grid() == [["a", "", "c"], ["", "", "d"]]


@pytest.mark.parametrize(
    "text",
    [
        "<fcel>a<nl><fcel>b<fcel>c<nl>",  # rows of two lengths
        "<lcel><fcel>a<nl>",
        "<ucel><nl>",
        "<fcel>a<xcel><nl>",
        "words<fcel>a<nl>",
        "<fcel>a<nl>words<fcel>b<nl>",
        "<nl>",
        "",
    ],
)
def test_cells_that_are_no_table_are_refused(text):
    with pytest.raises(ValueError, match=r"cells|cell|stands"):
        read_cells(text)


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ("<table><tr><td><table><tr><td>x</td></tr></table>", "a table in a cell"),
        ("<table><tr>words<td>a</td></tr></table>", "outside of cells"),
        ("<table><tr><td colspan=99999999>a</td></tr></table>", "span"),
        ("<table></table>", "no cells"),
        ("<table>" + "<tr><td rowspan=1000 colspan=1000>a</td></tr>" + "</table>", "more than"),
        (
            "<table><tr><td>a</td><td rowspan=2>b</td></tr><tr><td colspan=2>c</td></tr></table>",
            "overlap",
        ),
    ],
)
def test_a_malformed_table_stays_and_is_told(table, reason):
    text, notes = tables_as(f"x {table} y", "markdown")
    assert text == f"x {table} y"
    assert reason in notes[0]


def test_a_table_without_an_end_stays():
    assert tables_as("<table><tr><td>a", "markdown") == ("<table><tr><td>a", ())


def test_code_is_no_table():
    text = f"```\n{HTML}\n```\n"
    assert tables_as(text, "markdown") == (text, ())


def test_lines_with_bars_are_no_table():
    assert tables_as("a | b\nc | d", "html")[0] == "a | b\nc | d"
    assert tables_as("x\n---\ny", "html")[0] == "x\n---\ny"


def test_pipes_without_bars_at_the_ends():
    assert read_pipes("a | b\n--|--\n1 |").grid() == [["a", "b"], ["1", ""]]
