"""Tables that go over pages are one in the Markdown of a document, with the page of each part."""

from html.parser import HTMLParser

import pytest

from mmdeploy_llm.batch.documents.reading.continued import join_tables
from mmdeploy_llm.batch.documents.reading.folder import write_folder
from mmdeploy_llm.data.records.record import Record

HEAD = "| name | price |\n| --- | --- |\n"
FIRST = f"Prices\n\n{HEAD}| ink | 2.50 |\n| pen | 1.20 |"
HTML = "<table>\n<tr><th>name</th><th>price</th></tr>\n<tr><td>ink</td><td>2.50</td></tr>\n</table>"


class Cells(HTMLParser):
    """Reads the cells and comments of HTML with Python's own parser."""

    def __init__(self, text):
        super().__init__()
        self.found, self.is_open = [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.is_open = tag in ("td", "th")

    def handle_endtag(self, tag):
        self.is_open = False

    def handle_data(self, data):
        if self.is_open:
            self.found.append(data)

    def handle_comment(self, data):
        self.found.append(data.strip())


def joined(*pages, numbers=None):
    found = join_tables(pages, numbers or range(1, len(pages) + 1))
    return found.pages, found.num_joined


def test_a_header_that_comes_again_is_left_out():
    pages, num = joined(FIRST, f"{HEAD}| cap | 0.80 |\n\nThe end.")
    assert num == 1
    assert pages[0] == f"{FIRST}\n| <!-- page 2 --> cap | 0.80 |"
    assert pages[1] == "<!-- the rows of a table stand on page 1 -->\n\nThe end."


def test_a_row_that_stands_as_a_header_is_a_row():
    pages, num = joined(FIRST, "| cap | 0.80 |\n|---|---|\n| box | 9 |")
    assert (pages[0], num) == (
        f"{FIRST}\n| <!-- page 2 --> cap | 0.80 |\n| box | 9 |",
        1,
    )


def test_a_table_over_three_pages_with_headers_and_numbers_of_pages_between():
    pages, num = joined(
        f"{FIRST}\n\n<!-- page footer: ACME -->\n\n- 1 -",
        f"<!-- page header: x -->\n\n{HEAD}| cap | 0.80 |\n\nPage 2 of 3\n",
        f"3\n\n{HEAD}| box | 9 |\n\nThe end.",
    )
    assert num == 2
    assert pages[0].splitlines()[2:9] == [
        "| name | price |",
        "| --- | --- |",
        "| ink | 2.50 |",
        "| pen | 1.20 |",
        "| <!-- page 2 --> cap | 0.80 |",
        "| <!-- page 3 --> box | 9 |",
        "",
    ]
    assert pages[0].endswith("<!-- page footer: ACME -->\n\n- 1 -")
    assert pages[1].endswith("stand on page 1 -->\n\nPage 2 of 3\n")
    assert pages[2] == "3\n\n<!-- the rows of a table stand on page 1 -->\n\nThe end."


@pytest.mark.parametrize(
    ("second", "cells"),
    [
        ("<table><tr><td>pen</td><td>1.20</td></tr></table>", ["pen", "1.20"]),
        (HTML.replace("ink", "pen"), ["pen", "2.50"]),
        (
            "<table><thead><tr><th>Name</th><th> price</th></tr></thead><tbody><tr><td>pen</td>"
            "<td>1.20</td></tr></tbody></table>",
            ["pen", "1.20"],
        ),
        (
            "<TABLE><TR><TD colspan=2>all</TD></TR><TR><TD>a</TD><TD>b</TD></TR></TABLE>",
            ["all", "a", "b"],
        ),
    ],
)
@pytest.mark.parametrize("has_body", [False, True])
def test_html(second, cells, has_body):
    first = HTML.replace("</table>", "</tbody></table>") if has_body else HTML
    pages, num = joined(f"Prices\n{first}\n", f"{second}\n\nThe end.")
    assert num == 1
    assert Cells(pages[0]).found == ["name", "price", "ink", "2.50", "page 2", *cells]
    assert pages[0].rstrip().endswith("</tbody></table>" if has_body else "</table>")
    assert pages[1] == "<!-- the rows of a table stand on page 1 -->\n\nThe end."


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (FIRST, "| name | price | tax |\n|---|---|---|\n| cap | 0.80 | 1 |"),  # columns
        (FIRST, "| town | people |\n|---|---|\n| Rome | 9 |"),  # another header
        (FIRST, f"Other prices\n\n{HEAD}| cap | 0.80 |"),  # text between
        (f"{FIRST}\n\nAll prices are net.", f"{HEAD}| cap | 0.80 |"),
        (FIRST, "<table><tr><td>cap</td><td>0.80</td></tr></table>"),  # written otherwise
        (HTML, HTML.replace("name", "town")),
        (HTML, "<table><tr><td>cap</td></tr></table>"),
        (HTML, "<table><tr><td>a<table></table></td><td>b</td></tr></table>"),  # unreadable
        (FIRST, HEAD),  # a header alone
        (FIRST, ""),
        ("", f"{HEAD}| cap | 0.80 |"),
        (f"```\n{FIRST}\n```", f"{HEAD}| cap | 0.80 |"),  # code
        ("| a | b |\n|---|---|\n| x | y |", "| c | d |\n|---|---|\n| x | y |"),  # nothing says so
    ],
)
def test_other_tables_stay(first, second):
    assert joined(first, second) == ((first, second), 0)


def test_pages_that_do_not_follow_each_other():
    second = f"{HEAD}| cap | 0.80 |"
    assert joined(FIRST, second, numbers=[1, 3])[1] == 0
    assert joined(FIRST, "", second)[1] == 0  # page 2 could not be read
    assert joined(second, second, numbers=[2, 3])[1] == 1


def test_documents_have_the_table_and_pages_their_parts(tmp_path):
    second = f"{HEAD}| cap | 0.80 |"
    records = [
        Record(
            id=f"a.pdf#page={number}",
            path="a.pdf",
            text=text,
            columns={"document": "a.pdf", "page": number, "pages": 2},
        )
        for number, text in ((1, FIRST), (2, second))
    ]
    counts = write_folder(tmp_path, records, is_marked=True)
    assert (tmp_path / "a.pdf.md").read_text() == (
        f"<!-- page 1 -->\n\n{FIRST}\n| <!-- page 2 --> cap | 0.80 |\n\n"
        "<!-- page 2 -->\n\n<!-- the rows of a table stand on page 1 -->\n"
    )
    assert (tmp_path / "a.pdf.pages/0002.md").read_text() == f"{second}\n"
    told = "  1 part of tables over pages stands with the first (pages keep theirs)"
    assert told in counts.lines(tmp_path)


def test_a_page_of_numbers_costs_no_time():
    text = f"{FIRST}\n\n" + "1\n" * 20_000 + "x"
    assert joined(text, "1\n" * 20_000 + HEAD)[1] == 0
