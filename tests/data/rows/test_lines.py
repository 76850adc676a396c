"""Every line of a JSONL file, however damaged, becomes a Row or a BadItem."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmdeploy_llm.data.records.ids import Selection
from mmdeploy_llm.data.rows.files import File
from mmdeploy_llm.data.rows.lines import JsonlRows
from mmdeploy_llm.data.rows.rows import BadItem


def read(tmp_path, blob, **options):
    path = tmp_path / "in.jsonl"
    path.write_bytes(blob)
    rows = JsonlRows([File(path=str(path), name=path.name)], **options)
    return list(rows.read(Selection())), rows.num_rows


def test_good_and_bad_lines_keep_their_numbers(tmp_path):
    blob = b'\xef\xbb\xbf{"a": 1}\r\n\n{bad\n"\xff"\n[2]'
    rows, num_lines = read(tmp_path, blob)
    assert num_lines == 5
    assert rows[0].values == {"a": 1}
    assert (rows[-1].line, rows[-1].values) == (5, [2])
    bad = rows[1:-1]
    assert [row.line for row in bad] == [3, 4]
    assert "not JSON" in bad[0].message
    assert "not UTF-8" in bad[1].message


def test_a_line_that_is_too_long_is_skipped(tmp_path):
    blob = b'{"a": 1}\n' + b"x" * 5_000_000 + b"\n[2]\n"
    rows, _ = read(tmp_path, blob, max_line_bytes=1000)
    assert rows[0].values == {"a": 1}
    assert isinstance(rows[1], BadItem)
    assert (rows[1].line, rows[1].code) == (2, 413)
    assert (rows[2].line, rows[2].values) == (3, [2])


@pytest.mark.parametrize("num_over", [-1, 0, 1])
def test_the_limit_is_exact(tmp_path, num_over):
    line = json.dumps("x" * (98 + num_over)).encode()
    rows, _ = read(tmp_path, line + b"\n[1]\n", max_line_bytes=100)
    assert isinstance(rows[0], BadItem) == (num_over > 0)
    assert rows[1].line == 2


def test_deep_nesting_is_a_bad_item(tmp_path):
    rows, _ = read(tmp_path, b"[" * 200_000 + b"\n[1]\n")
    assert isinstance(rows[0], BadItem)
    assert rows[1].values == [1]


def test_a_line_of_very_many_values_is_refused_before_it_is_parsed(tmp_path):
    """58 MB of `[],` took 1.5 GB and 22 seconds."""
    rows, _ = read(tmp_path, b"[" + b"[]," * 1_500_000 + b"0]\n[1]\n")
    assert "commas and brackets" in rows[0].message
    assert rows[1].values == [1]


def test_a_long_text_is_a_line(tmp_path):
    rows, _ = read(tmp_path, json.dumps({"prompt": "word, " * 1_000_000}).encode())
    assert len(rows[0].values["prompt"]) == 6_000_000


def test_blank_lines_are_skipped_together_and_counted(tmp_path):
    """100 MB of them did not end in a minute."""
    rows, num_lines = read(tmp_path, b"\n" * 20_000_000 + b" \n\r\n[1]\n\n\n[2]")
    assert [(row.line, row.values) for row in rows] == [(20_000_003, [1]), (20_000_006, [2])]
    assert num_lines == 20_000_006


@pytest.mark.full
@given(st.lists(st.binary(max_size=30), max_size=8))
def test_any_bytes_give_every_line_that_is_not_blank(tmp_path_factory, pieces):
    blob = b"\n".join(pieces)
    rows, num_lines = read(tmp_path_factory.mktemp("lines"), blob)
    lines = blob.split(b"\n")
    wanted = [number for number, line in enumerate(lines, 1) if line.strip()]
    assert [row.line for row in rows] == wanted
    assert num_lines == (len(lines) if lines[-1] else len(lines) - 1)
