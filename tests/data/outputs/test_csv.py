"""The output `captions.csv`: a table of real columns, made from lines that a run resumes."""

import csv
import json

import pytest

from mmdeploy_llm.data.outputs.opening.choose import open_sink
from mmdeploy_llm.data.outputs.opening.merged import MergedOutputs
from mmdeploy_llm.data.outputs.scan import Kept
from mmdeploy_llm.data.records.record import ItemError, Record
from mmdeploy_llm.errors import ConfigError

ODD = [
    Record(id="a", line=1, text='two "quoted", lines\nand, a comma', columns={"n": 1, "t": "x,y"}),
    Record(id="b", line=2, text="=HYPERLINK(1)", columns={"n": None, "tags": ["a", "b"]}),
    Record(id="-c", line=3, error=ItemError(code=400, kind="RequestError", message="+no")),
    Record(id="ä 日本", line=4, text="\r\0 a\udcff", columns={"Text": "same name", "n": 2.5}),
]


def write(path, *records, mode="new"):
    sink = open_sink(str(path))
    sink.check(mode)
    kept = sink.scan(lambda own: own.line) if mode == "resume" else Kept()
    with sink.writer(mode, kept) as writer:
        for record in records:
            writer.write(record, record.line)
        writer.finish(lambda own: own.line)


def rows_of(path):
    with open(path, encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "out.csv"
    write(path, *ODD)
    return path


def test_rows_are_quoted_and_have_real_columns(table):
    rows = rows_of(table)
    assert [row["id"] for row in rows] == ["a", "b", "'-c", "ä 日本"]
    assert rows[0]["text"] == ODD[0].text
    assert rows[0]["t"] == "x,y"
    assert [row["n"] for row in rows] == ["1.0", "", "", "2.5"]
    assert json.loads(rows[1]["tags"]) == ["a", "b"]
    assert rows[3]["column_Text"] == "same name"
    assert rows[2]["error_code"] == "400"


def test_only_a_table_with_more_than_ascii_begins_with_a_byte_order_mark(tmp_path, table):
    """Excel needs it; whatever reads ASCII does not."""
    assert table.read_bytes().startswith(b"\xef\xbb\xbfid,line,")
    write(tmp_path / "plain.csv", ODD[0])
    assert (tmp_path / "plain.csv").read_bytes().startswith(b"id,line,")
    sink = open_sink(str(table))
    sink.check("overwrite")  # it knows its own table again


@pytest.mark.parametrize("first", ["\uff1d", "\uff0b", "\uff0d", "\uff20"])
def test_a_formula_in_full_width_is_none(tmp_path, first):
    """Excel of East Asia takes the full-width signs for the usual ones."""
    write(tmp_path / "out.csv", Record(id="a", line=1, text=f"{first}1+1"))
    assert rows_of(tmp_path / "out.csv")[0]["text"] == f"'{first}1+1"


def test_no_cell_is_a_formula(table):
    rows = rows_of(table)
    assert rows[1]["text"] == "'=HYPERLINK(1)"
    assert rows[2]["error_message"] == "'+no"
    assert rows[3]["text"] == "'\r\ufffd a\ufffd"
    for row in rows:
        assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r")) for cell in row.values())


def test_the_lines_have_the_exact_texts_and_are_resumed(table):
    assert [own.text for own in MergedOutputs([str(table)]).records()][1] == "=HYPERLINK(1)"
    write(table, Record(id="e", line=5, text="later", columns={"new": True}), mode="resume")
    rows = rows_of(table)
    assert [row["id"] for row in rows] == ["a", "b", "ä 日本", "e"]  # the failed one is retried
    assert [row["new"] for row in rows] == ["", "", "", "true"]


def test_pandas_reads_it(table):
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv(table)
    assert list(frame["n"].dropna()) == [1.0, 2.5]
    assert frame["text"][0] == ODD[0].text


def test_a_table_of_somebody_else_stays(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("name,price\na,1\n")
    for mode in ("new", "overwrite", "resume"):
        with pytest.raises(ConfigError, match=r"exists"):
            open_sink(str(path)).check(mode)
    assert path.read_text() == "name,price\na,1\n"
    link = tmp_path / "link.csv"
    link.symlink_to(path)
    with pytest.raises(ConfigError, match="a link"):
        open_sink(str(link)).check("overwrite")


def test_a_table_without_its_lines_is_not_continued(table):
    lines = table.with_name("out.csv.jsonl")
    lines.rename(lines.with_name("away"))
    with pytest.raises(ConfigError, match=r"out\.csv\.jsonl' *, which is missing"):
        open_sink(str(table)).check("resume")
    write(table, ODD[0], mode="overwrite")
    assert len(rows_of(table)) == 1


def test_a_table_that_is_gone_is_made_again(table):
    table.unlink()
    sink = open_sink(str(table))
    assert not sink.exists()
    write(table, mode="resume")
    assert len(rows_of(table)) == 3


def test_what_a_table_cannot_be(tmp_path):
    with pytest.raises(ConfigError, match="on this machine"):
        open_sink("s3://bucket/x.csv")
    with pytest.raises(ConfigError, match="no effect on the format csv"):
        open_sink(tmp_path / "x.csv", part_items=3)


def test_answers_come_first_then_columns_then_the_rest(tmp_path):
    why = {"outcome": "truncated", "outcome_reason": "max_tokens was reached"}
    first = Record(id="a", line=1, text="x", columns={"url": "u"}, **why)
    second = Record(id="b", line=2, text="y", answers={"caption": "c", "tags": ["t"]})
    write(tmp_path / "out.csv", first, second)
    header = (tmp_path / "out.csv").read_text().splitlines()[0].split(",")
    assert header[:7] == ["id", "line", "path", "text", "caption", "tags", "url"]
    assert header[-1] == "outcome_reason"
