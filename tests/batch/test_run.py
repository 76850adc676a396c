"""Whole batches with a fake LLM: plan, loop, resume, summary."""

import itertools
import json
import os
import tracemalloc

import pytest

from mmdeploy_llm.batch.job import plan_batch, run_batch
from mmdeploy_llm.batch.settings import BatchSettings
from mmdeploy_llm.data.outputs.scan import read_records, records_at
from mmdeploy_llm.data.records.ids import Selection
from mmdeploy_llm.data.records.outcome import NOTHING
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.errors import ConfigError, EngineError


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.jsonl"


def no_model():
    raise AssertionError("the model was opened")


def do(llm, given, out, open_llm=None, **settings):
    job = plan_batch(given, out, BatchSettings(**settings))
    return run_batch(job, open_llm or (lambda: llm))


def prompts(*texts):
    return [{"prompt": text} for text in texts]


def test_every_line_gets_its_own_record_as_it_finishes(fake_llm, jsonl, out):
    summary = do(fake_llm, jsonl(*prompts("a", "b", "c", "d", "e")), out)
    records = list(read_records(out))
    assert [record.id for record in records] == [2, 1, 4, 3, 5]
    assert {record.id: record.text for record in records}[4] == "a caption of d"
    assert summary.ending == "done"
    assert (summary.run.num_done, summary.run.num_failed) == (5, 0)
    assert (summary.num_records, summary.num_left) == (5, 0)
    assert summary.run.num_output_tokens == 15
    assert summary.run.tokens_per_second > 0
    assert fake_llm.is_closed


def test_bad_lines_are_records_and_harm_no_other(fake_llm, jsonl, out):
    rows = [{"prompt": "a"}, "{", {"prompt": "bad"}, {"odd": 1}, "", {"prompt": "e"}]
    summary = do(fake_llm, jsonl(*rows), out)
    by_line = {record.line: record for record in read_records(out)}
    assert sorted(by_line) == [1, 2, 3, 4, 6]
    assert [line for line, record in by_line.items() if record.is_ok] != []
    assert sorted(line for line, record in by_line.items() if record.is_ok) == [1, 6]
    assert summary.failures == {"400 RequestError": 2, "400 MediaError": 1}
    assert summary.run.num_failed == 3


def test_doubled_ids_are_errors_that_take_no_id(fake_llm, jsonl, out):
    rows = [{"id": "a", "prompt": "x"}, {"id": 3, "prompt": "y"}, {"prompt": "z"}]
    rows += [{"id": "a", "prompt": "w"}]
    for mode in ("new", "resume", "resume"):
        do(fake_llm, jsonl(*rows), out, mode=mode)
        records = list(read_records(out))
        assert sorted(str(record.id) for record in records) == ["3", "None", "None", "a"]
        assert {record.line for record in records if not record.is_ok} == {3, 4}


def test_a_folder_gives_a_question_about_each_file(fake_llm, pictures, out):
    (pictures / "clip.mp4").write_bytes(b"")
    settings = {"chat_template_kwargs": {"enable_thinking": True}}
    summary = do(fake_llm, pictures, out, **settings)
    assert summary.num_records == 6
    assert (summary.run.num_items, summary.unit) == (6, "file")
    asked = {next(prompt.items).kind: prompt for prompt in fake_llm.prompts}
    assert next(asked["video"].items).source.uri == str(pictures / "clip.mp4")
    assert asked["video"].messages[0].text == "Describe the video."
    assert asked["image"].messages[0].text == "Describe the image."
    assert fake_llm.prompts[0].template_kwargs == {"enable_thinking": True}


def test_file_names_never_read_as_urls(fake_llm, tmp_path, monkeypatch, out, png):
    (tmp_path / "data:a.png").write_bytes(png)
    monkeypatch.chdir(tmp_path)
    do(fake_llm, ".", out)
    assert next(fake_llm.prompts[0].items).source.uri == os.path.abspath("data:a.png")


def test_resume_does_only_what_is_missing_or_failed(fake_llm, jsonl, out):
    do(fake_llm, jsonl(*prompts("a", "bad", "c")), out)
    again = jsonl(*prompts("a", "good now", "c", "d"))
    summary = do(fake_llm, again, out, mode="resume")
    assert [prompt.text for prompt in fake_llm.prompts[3:]] == ["good now", "d"]
    assert sorted(record.id for record in read_records(out)) == [1, 2, 3, 4]
    assert (summary.num_before, summary.num_records, summary.num_failed) == (2, 4, 0)


@pytest.mark.full
def test_failed_ones_stay_when_they_are_not_to_be_done_again(fake_llm, jsonl, out):
    given = jsonl({"prompt": "a"}, {"prompt": "bad"}, "{", {"prompt": "d"})
    do(fake_llm, given, out, max_failures=2)
    summary = do(fake_llm, given, out, mode="resume", retried=NOTHING)
    assert summary.num_failed == 2
    assert summary.num_records == 4
    assert do(no_model, given, out, mode="resume", retried=NOTHING).run.num_items == 0


def test_nothing_left_to_do_opens_no_model_and_changes_nothing(fake_llm, jsonl, out):
    given = jsonl(*prompts("a", "b"))
    do(fake_llm, given, out)
    before = out.read_bytes()
    summary = do(None, given, out, no_model, mode="resume")
    assert summary.run.num_items == 0
    assert summary.num_records == 2
    assert out.read_bytes() == before


@pytest.mark.full
def test_a_doubled_line_goes_even_when_nothing_is_left_to_do(fake_llm, jsonl, out):
    given = jsonl(*prompts("a", "b"))
    do(fake_llm, given, out)
    out.write_bytes(out.read_bytes() * 2)
    summary = do(None, given, out, no_model, mode="resume")
    assert sorted(record.id for record in read_records(out)) == [1, 2]
    found = records_at(out, summary.index.offsets())
    assert [record.id for record in found] == [1, 2]


def test_an_empty_input_gives_an_empty_output(jsonl, out):
    assert do(None, jsonl(), out, no_model).num_records == 0
    assert out.read_bytes() == b""


def test_a_model_that_cannot_be_opened_costs_no_old_output(jsonl, out):
    precious = Record(id="precious", text="old").to_json() + "\n"
    out.write_text(precious)

    def open_llm():
        raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model"):
        do(None, jsonl(*prompts("a")), out, open_llm, mode="overwrite")
    assert out.read_text() == precious


def test_ctrl_c_keeps_what_is_done_and_aborts_the_rest(fake_llm, jsonl, out):
    given = jsonl(*prompts("a", "b", "c", "stop", "e"))
    summary = do(fake_llm, given, out)
    assert summary.ending == "interrupted"
    assert summary.num_left == 3
    assert [record.id for record in read_records(out)] == [2, 1]


def test_the_run_ends_at_max_failures(fake_llm, jsonl, out):
    given = jsonl(*prompts("a", "bad", "c", "bad", "e", "f", "g"))
    summary = do(fake_llm, given, out, max_failures=2)
    assert summary.ending == "max_failures"
    assert fake_llm.num_taken == 4
    assert fake_llm.is_aborted
    assert summary.num_left == 7 - len(list(read_records(out)))


def test_bad_lines_alone_reach_max_failures_too(fake_llm, jsonl, out):
    given = jsonl({"prompt": "a"}, *["{"] * 50, {"prompt": "b"})
    summary = do(fake_llm, given, out, max_failures=10)
    assert summary.ending == "max_failures"
    assert summary.run.num_failed == 10


def test_an_engine_that_fails_leaves_what_is_done(jsonl, out, fake_llm):
    fake_llm.answer = lambda prompt, index=0: (_ for _ in ()).throw(EngineError("no memory"))
    with pytest.raises(EngineError):
        do(fake_llm, jsonl("{", *prompts("a", "b")), out)
    assert len(list(read_records(out))) == 1


@pytest.mark.full
def test_shards_into_one_file_keep_each_others_failures(fake_llm, jsonl, out):
    given = jsonl(*prompts("bad", "bad", "c", "d"))
    for shard in (1, 2):
        part = Selection(shard=shard, num_shards=2)
        summary = do(fake_llm, given, out, mode="resume", selection=part)
        assert summary.num_records == 2
    assert sorted(record.line for record in read_records(out)) == [1, 2, 3, 4]


def test_prompts_are_taken_only_when_the_engine_wants_them(fake_llm, out):
    def endless():
        for number in itertools.count():
            assert number < 7, "the input was read ahead of the engine"
            yield {"prompt": "stop" if number == 5 else f"p{number}"}

    assert do(fake_llm, endless(), out).ending == "interrupted"


@pytest.mark.long
def test_memory_does_not_grow_with_the_batch(fake_llm, tmp_path):
    """Ids, the index and checksums take 89 bytes an item; the prompts alone would take 500."""
    fake_llm.prompts = fake_llm.params = type("Nothing", (), {"append": lambda *_: None})()

    def peak_of(count):
        rows = ({"id": f"item-{number}", "prompt": "x" * 500} for number in range(count))
        out = tmp_path / f"{count}.jsonl"
        tracemalloc.start()
        do(fake_llm, rows, out)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert sum(1 for _ in read_records(out)) == count
        return peak

    peak_of(1)  # what is imported on the way stays
    assert peak_of(20_000) - peak_of(2) < 150 * 20_000


def test_a_summary_says_what_it_is(fake_llm, jsonl, out):
    summary = do(fake_llm, jsonl(*prompts("a", "bad", "<b>")), out, use_tqdm=False)
    title, records, left, run, failures, *rest = repr(summary).splitlines()
    assert title.startswith("BatchSummary('done', output='")
    assert out.name in title
    assert (records, left) == ("  records: 3, of which 2 ok, 1 failed", "  left: 0")
    assert run.startswith("  this run: 3 in ")
    assert failures.startswith("  failures: 1 x ")
    assert rest == []
    assert len(repr(summary)) < 500
    page = summary._repr_html_()
    assert page.startswith("<table>")
    assert "2 ok, 1 failed" in page


def test_the_bar_is_shown_when_asked_and_counts(fake_llm, jsonl, out, capsys):
    do(fake_llm, jsonl(*prompts("a", "bad")), out, use_tqdm=True)
    shown = capsys.readouterr()
    assert "2/2" in shown.err
    assert "1 failed" in shown.err
    assert shown.out == ""


def test_no_bar_in_a_log_file(fake_llm, jsonl, out, capsys):
    do(fake_llm, jsonl(*prompts("a")), out)
    assert capsys.readouterr().err == ""


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("nowhere.jsonl", "does not exist"),
        ("clip.mp4", "is not a batch"),
        ({"prompt": "x"}, "put it in"),
    ],
)
def test_inputs_that_are_none(given, words, tmp_path, monkeypatch, out):
    (tmp_path / "clip.mp4").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words):
        plan_batch(given, out, BatchSettings())


def test_the_input_is_never_the_output(jsonl):
    given = jsonl({"prompt": "a"})
    with pytest.raises(ConfigError, match="is the input"):
        plan_batch(given, given, BatchSettings(mode="overwrite"))
    assert json.loads(given.read_text()) == {"prompt": "a"}
