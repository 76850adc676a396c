"""A run that is done has a result for each item of its input, or says what is missing."""

import json

import pytest

from mmdeploy_llm.batch.job import plan_batch, run_batch
from mmdeploy_llm.batch.settings import BatchSettings
from mmdeploy_llm.data.outputs.opening.choose import open_sink
from mmdeploy_llm.data.outputs.opening.merged import MergedOutputs
from mmdeploy_llm.data.records.state import RunState

OUTPUTS = ("out.jsonl", "out.parquet", "out.tar")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows(num):
    return [{"id": f"item-{number}", "prompt": f"a {number}"} for number in range(num)]


def batch(given, output, llm, mode="new"):
    return run_batch(plan_batch(given, output, BatchSettings(mode=mode)), lambda: llm)


class Forgetful:
    """An engine that loses every third item, as no engine should."""

    def __init__(self, llm):
        self.llm = llm

    def answer_each(self, asks):
        for number, answer in enumerate(self.llm.answer_each(asks)):
            if number % 3:
                yield answer

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.mark.one_is_quick
@pytest.mark.parametrize("output", OUTPUTS)
def test_items_without_an_answer_do_not_count_as_done(fake_llm, output, caplog):
    summary = batch(rows(9), output, Forgetful(fake_llm))
    assert summary.num_left == 3
    assert summary.disagreements == ("3 of 9 items have no result; --resume does them",)
    assert summary.disagreements[0] in caplog.text
    (state,) = MergedOutputs([output]).outputs
    assert state.missing == "3 of 9 items are not done"
    again = batch(rows(9), output, fake_llm, "resume")
    assert (again.num_left, again.disagreements, again.num_records) == (0, (), 9)
    assert len(list(open_sink(output).entries())) == 9


def test_an_input_that_becomes_shorter_is_told(fake_llm, jsonl, caplog):
    given = jsonl(*({**row, "prompt": "a" * 10_000} for row in rows(400)))  # more than a buffer
    job = plan_batch(given, "out.jsonl", BatchSettings())
    lines = given.read_text().splitlines(keepends=True)
    given.write_text("".join(lines[:150]))
    summary = run_batch(job, lambda: fake_llm)
    assert summary.num_left == 400 - summary.num_records > 0
    assert "had 400 items when the run began and has 150 now" in summary.disagreements[0]
    again = batch(given, "out.jsonl", fake_llm, "resume")
    assert again.disagreements == ()


@pytest.mark.one_is_quick
@pytest.mark.parametrize("mode", ["new", "resume"])
def test_failed_doubled_and_unreadable_lines_are_results(fake_llm, jsonl, mode):
    given = jsonl({"id": "a", "prompt": "bad"}, {"id": "a", "prompt": "b"}, "{", *rows(3))
    batch(given, "out.jsonl", fake_llm)
    if mode == "resume":
        summary = batch(given, "out.jsonl", fake_llm, "resume")
    else:
        summary = batch(given, "other.jsonl", fake_llm)
    assert (summary.num_records, summary.num_left, summary.disagreements) == (6, 0, ())


def test_an_output_that_vanishes_before_its_report_is_told(fake_llm):
    from mmdeploy_llm.data.records.files import OutputLostError

    summary = batch(rows(3), "out.jsonl", fake_llm)
    with open("out.jsonl", "r+b") as file:
        file.write(b"#" * 20)
    with pytest.raises(OutputLostError, match="was changed while its records were read"):
        list(summary.records())
    summary = batch(rows(3), "out.parquet", fake_llm)
    open_sink("out.parquet").shelf.remove("part-00000.parquet")
    with pytest.raises(OutputLostError, match="was changed while its records were read"):
        list(summary.records())


def test_outputs_that_grow_while_a_report_reads_them_are_told(here, fake_llm, monkeypatch):
    batch(rows(3), "out.jsonl", fake_llm)
    real, line = (
        MergedOutputs._repeated,
        json.loads((here / "out.jsonl").read_text().splitlines()[0]),
    )

    def repeated(self):
        found = real(self)
        with open("out.jsonl", "a") as file:
            file.write(json.dumps({**line, "id": "late", "line": 9}) + "\n")
        return found

    monkeypatch.setattr(MergedOutputs, "_repeated", repeated)
    merged = MergedOutputs(["out.jsonl"])
    assert merged.missing() == {"out.jsonl": "it changed while it was read; write the report again"}


@pytest.mark.parametrize("is_removed", [True, False])
def test_blank_lines_are_no_items(fake_llm, here, is_removed):
    """They are counted in advance for the progress bar."""
    texts = [json.dumps(row) for row in rows(3)]
    (here / "in.jsonl").write_text("\n\n".join(texts) + "\n\n\n")
    job = plan_batch("in.jsonl", "out.jsonl", BatchSettings())
    if is_removed:
        (here / "in.jsonl").unlink()
    summary = run_batch(job, lambda: fake_llm)
    assert (summary.num_records, summary.num_left, summary.disagreements) == (3, 0, ())
    assert MergedOutputs(["out.jsonl"]).missing() == {}


def test_a_run_that_was_killed_after_its_last_result_is_done_when_it_is_resumed(fake_llm, here):
    (here / "in.jsonl").write_text("\n".join(json.dumps(row) + "\n" for row in rows(3)))
    batch("in.jsonl", "out.jsonl", fake_llm)
    before = (here / "out.jsonl").read_bytes()
    path = here / "out.jsonl.state.json"
    RunState(ending="running", total=5, shard=1, num_shards=1, output="out.jsonl").write(path)
    assert MergedOutputs(["out.jsonl"]).missing() == {"out.jsonl": "2 of 5 items are not done"}
    batch("in.jsonl", "out.jsonl", None, "resume")
    assert MergedOutputs(["out.jsonl"]).missing() == {}
    assert (here / "out.jsonl").read_bytes() == before
