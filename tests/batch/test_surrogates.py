"""Lone surrogates and file names that are not UTF-8, through whole batches: every item has a record
that any reader of JSON accepts, a resumed run knows it again, and the report is written."""

import json
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from mmdeploy_llm import LLM
from mmdeploy_llm.batch.report.page import ReportHead, write_report
from mmdeploy_llm.cli import app
from mmdeploy_llm.data.outputs.scan import RecordIndex, read_records
from mmdeploy_llm.data.records.item import Media
from mmdeploy_llm.data.records.record import ItemError, Record

LONE = ["\ud800", "\udcff", "a\udfffb", "\ud83d\ude00", "\ude00\ud83d"]  # the last two: no pair
ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def is_portable(line):
    """Whether a strict reader of JSON accepts the line."""
    line.decode("utf-8")
    json.loads(line)
    return not ESCAPE.search(line.replace(b"\\\\", b""))


@pytest.mark.full
@given(name=st.text(st.characters(categories=["Cs", "Lu", "Po", "Cc", "So"])))
def test_records_with_any_text_are_read_again_and_by_others(name):
    for record in (
        Record(id=name or "x", path=name or "x", prompt=name),
        Record(id=3, line=3, media=(Media(kind="image", name=name), Media(kind="video", name="v"))),
        Record(id="x", error=ItemError(code=400, kind=name, message=name)),
    ):
        line = record.to_json().encode()
        assert is_portable(line)
        again = Record.from_json(line)
        assert (again.id, again.path, again.media) == (record.id, record.path, record.media)
        assert again.key == record.key


@pytest.mark.parametrize(
    "exact",
    ["3", "[]", '{"id": 3}', '{"id": "\\u00e9"}', '{"media": ["a"]}', '{"id": "\\\\x"}', "true"],
)
def test_exact_texts_that_are_none_are_refused(exact):
    with pytest.raises(ValueError):
        Record.from_json(f'{{"id": "a", "exact": {exact}}}')


@pytest.fixture(scope="module")
def llm():
    with LLM("shapes-vl", num_threads=1, max_num_seqs=4) as llm:
        yield llm


@pytest.fixture
def odd(tmp_path, png):
    """A folder of pictures with names that are not UTF-8; skips where the disk refuses them."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name in (b"a\xff.png", b"a\xfe.png", b"\xed\xa0\x80.png", b"good.png"):
        try:
            (folder / os.fsdecode(name)).write_bytes(png)
        except OSError:
            pytest.skip("this file system accepts UTF-8 only")
    (folder / os.fsdecode(b"bad\xff.png")).write_bytes(b"no picture")
    return folder


@pytest.mark.full
def test_files_whose_names_are_not_utf8_are_captioned(odd, tmp_path):
    out, page = tmp_path / "out.jsonl", tmp_path / "page.html"
    words = ["caption", str(odd), "--output", str(out), "--report", str(page), "--table"]
    words += ["--max-tokens", "4", "--num-threads", "1"]
    first = CliRunner().invoke(app, words)
    assert first.exit_code == 1, first.output
    assert "Traceback" not in first.output
    lines = out.read_bytes().splitlines()
    assert all(map(is_portable, lines))
    records = {os.fsencode(record.path): record for record in read_records(out)}
    assert sorted(map(os.path.basename, records)) == sorted(map(os.fsencode, os.listdir(odd)))
    assert [os.path.basename(path) for path, record in records.items() if not record.is_ok] == [
        b"bad\xff.png"
    ]
    shown = json.loads(next(line for line in lines if b"a\\\\udcff" in line))
    assert shown["path"] == str(odd / "a\ufffd.png")
    assert shown["exact"]["path"].endswith("a\\udcff.png")
    assert page.read_bytes().count(b"data:image/jpeg") == 4
    again = CliRunner().invoke(app, [*words, "--resume", "--no-retry-failed"])
    assert "nothing left to do" in again.stdout
    assert out.read_bytes().splitlines() == lines


@pytest.mark.full
def test_every_line_gets_its_own_400_and_no_traceback(llm, odd, tmp_path, caplog):
    out, page = tmp_path / "out.jsonl", tmp_path / "page.html"
    picture = str(odd / os.fsdecode(b"a\xff.png"))
    good = [{"id": text, "prompt": "The fox"} for text in LONE]
    part = {"type": "image", "image": picture}
    chat = [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]
    good.append({"id": "picture", "messages": chat})
    wrong = []
    for text in LONE:
        wrong += [
            {"prompt": text},
            {"prompt": "x", "multimodal_data": {"image": f"{text}.png"}},
            {"prompt": "x", "multimodal_data": {text: "a.png"}},
            {"prompt": "x", "sampling_params": {"stop": [text]}},
            {"prompt": "x", "sampling_params": {"bad_words": [text]}},
            {"prompt": "x", "sampling_params": {text: 1}},
            {"messages": [{"role": "user", "content": text}]},
            {"messages": [{"role": text, "content": "x"}]},
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": text}},
            {"messages": [{"role": "user", "content": "x"}], "tools": [tool(text)]},
            {text: 1},
        ]
    rows = good + [{"id": f"wrong-{number}", **row} for number, row in enumerate(wrong)]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"prompt": None, "report": page, "use_tqdm": False}
    llm.run_batch(source, out, **options)
    assert all(map(is_portable, out.read_bytes().splitlines()))
    records = {record.id: record for record in read_records(out)}
    # JSON joins the two halves of a pair; that id, too, is the item's own.
    merged = {json.loads(json.dumps(row["id"])) for row in rows}
    assert set(records) == merged
    failed = {name: record for name, record in records.items() if not record.is_ok}
    pair = {f"wrong-{number}" for number in range(3 * 11, 4 * 11)}  # is a character in JSON
    assert {f"wrong-{number}" for number in range(len(wrong))} - set(failed) <= pair
    assert not any(name in failed for name in merged if not name.startswith("wrong"))
    assert {record.error.code for record in failed.values()} <= {400}
    assert page.read_text().count("<article") == len(rows)
    assert not [entry for entry in caplog.records if entry.exc_info]
    summary = llm.run_batch(source, out, resume=True, retry_failed=False, use_tqdm=False)
    assert summary.run.num_items == 0


def tool(text):
    function = {"name": "f", "description": text, "parameters": {"type": "object"}}
    return {"type": "function", "function": function}


@pytest.mark.one_is_quick
@pytest.mark.parametrize("text", LONE)
def test_a_report_of_any_text_is_written(tmp_path, text):
    for num in (1, 301):
        records = [
            Record(
                id=f"{number}{text}",
                text=text,
                prompt=text,
                path=text,
                error=ItemError(code=400, kind=text, message=text) if number % 2 else None,
                media=(Media(kind="image", name=f"/{text}"),),
            )
            for number in range(num)
        ]
        index = RecordIndex()
        for number, record in enumerate(records):
            index.add(record, number, 0)
        head = ReportHead(model=text, created=text, version=text, settings={text: text})
        page = tmp_path / f"page{num}.html"
        write_report(page, records, head, index, lambda media: (), num_shown=num)
        assert page.read_text().count("<article") == min(num, 200)
