"""A run without a terminal tells what it does: by lines, and by a log with one object per event."""

import fcntl
import io
import json
import os
import re
import select
import struct
import sys
import termios
import threading
import time
from dataclasses import replace

import pytest

from mmdeploy_llm.batch.answers.restarts import Restarting
from mmdeploy_llm.batch.answers.validated import Validated
from mmdeploy_llm.batch.job import plan_batch, run_batch
from mmdeploy_llm.batch.progress.log import EventLog
from mmdeploy_llm.batch.progress.reporter import ProgressOptions, ProgressReporter, line_of
from mmdeploy_llm.batch.settings import BatchSettings
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.engine.desk.ask import Ask
from mmdeploy_llm.engine.desk.outcome import Answer
from mmdeploy_llm.errors import ConfigError, WorkerDiedError
from mmdeploy_llm.values.outputs.request_output import (
    CompletionOutput,
    Completions,
    RequestMetrics,
    RequestOutput,
)
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.prompt import PromptParts

COMMON = {"event", "time", "elapsed", "output"}
EVENTS = {
    "started": {"mode", "unit", "num_items", "num_before", "pid", "version"},
    "loaded": set(),
    "progress": {
        *("num_done", "num_failed", "outcomes", "num_prompt_tokens", "num_output_tokens", "unit"),
        *("num_left", "items_per_second", "tokens_per_second", "seconds_left"),
    },
    "item": {"id", "line", "outcome", "outcome_reason", "error"},
    "retried": {"id", "number", "check", "why"},
    "engine_restarted": {"reason", "num_items"},
    "finished": {
        *("ending", "error", "num_left", "num_before", "run", "all", "failures", "lacks", "boxes"),
        *("disagreements", "asked_again", "num_skipped"),
    },
}


class Model:
    """Answers with the prompt; "" is empty, "bad" fails, "slow" takes until its progress was told,
    "stop" is Ctrl-C."""

    def __init__(self, log=None):
        self.log = log

    def answer_each(self, asks):
        for ask in asks:
            said = ask.prompt.text.partition(" ")[0]
            if said == "stop":
                raise KeyboardInterrupt
            if said == "broken":
                raise RuntimeError("no more")
            if said == "slow":
                most = num_progress(self.log) + 2  # the next one may have been begun before
                until(lambda most=most: num_progress(self.log) >= most)
            yield Answer(ask=ask, output=answered(said))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def num_progress(log):
    return log.read_text().count('"progress"')


def until(is_so):
    """Waits until something is so."""
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


def answered(said):
    fault = {"error_code": 400, "error_msg": "x"} if said == "bad" else {}
    sample = CompletionOutput(text=said, token_ids=[1, 2], finish_reason="stop", **fault)
    return RequestOutput(
        request_id="r",
        prompt=None,
        outputs=Completions([sample]),
        finished=True,
        metrics=RequestMetrics(arrival_time=1.0),
        **fault,
    )


@pytest.fixture
def run(tmp_path):
    """Returns a function that runs a batch of prompts, and the events of all runs so far."""
    log, out = tmp_path / "events.jsonl", tmp_path / "out.jsonl"

    def make(*said, mode="new", **settings):
        rows = [{"id": f"{i}", "prompt": words} for i, words in enumerate(said)]
        progress = ProgressOptions(log_json=log, seconds=0.05)
        given = BatchSettings(mode=mode, progress=progress, **settings)
        try:
            run_batch(plan_batch(rows, out, given), lambda: Model(log))
        finally:
            make.events = [json.loads(line) for line in log.read_text().splitlines()]
        return make.events

    return make


def test_every_event_has_the_documented_values(run):
    events = run("a", "bad", " ", "slow", "slow 2", use_tqdm=False)
    for event in events:
        assert set(event) == EVENTS[event["event"]] | COMMON
        assert event["time"].endswith("Z")
    names = [event["event"] for event in events if event["event"] != "progress"]
    assert names == ["started", "loaded", "item", "item", "finished"]
    assert any(event["event"] == "progress" for event in events)
    failed, empty = (event for event in events if event["event"] == "item")
    assert (failed["id"], failed["outcome"], failed["error"]["code"]) == ("1", "failed", 400)
    assert (empty["id"], empty["outcome"], empty["error"]) == ("2", "empty", None)
    last = events[-1]
    assert (last["ending"], last["all"]) == ("done", {"ok": 3, "failed": 1, "empty": 1})
    assert last["run"]["num_done"] == 3


def test_a_run_that_goes_on_adds_to_the_log_and_tells_how_each_ended(run):
    with pytest.raises(RuntimeError):
        run("a", "broken")
    assert (run.events[-1]["ending"], run.events[-1]["error"]) == ("error", "no more")
    assert run("a", "stop", mode="resume")[-1]["ending"] == "interrupted"
    events = run("a", "b", mode="resume")
    assert [event["ending"] for event in events if event["event"] == "finished"] == [
        *("error", "interrupted", "done")
    ]
    starts = [event for event in events if event["event"] == "started"]
    assert [start["num_before"] for start in starts] == [0, 1, 1]
    assert run("a", "b", mode="resume")[-1]["num_before"] == 2  # nothing is left to do


class Dying(Model):
    """An engine that dies at its second prompt, once."""

    death, num_dead, is_new = None, 0, True

    def restart(self):
        self.death, self.is_new = None, False

    def answer_each(self, asks):
        for number, answer in enumerate(super().answer_each(asks)):
            if number == 1 and self.is_new:
                self.death = WorkerDiedError("killed")
                raise self.death
            yield answer


class NoA:
    """Wants no "a" in the first answer."""

    name = "no_a"

    def __init__(self):
        self.left = 1

    def violation(self, text):
        self.left -= text == "a"
        return "it has an a" if text == "a" and self.left >= 0 else None


def test_what_is_asked_again_is_told():
    told = []
    params = SamplingParams()
    asks = [
        Ask(
            prompt=PromptParts(text=said),
            params=params,
            item=Item(line=1, id=said, prompt=PromptParts(), params=params),
        )
        for said in ("a", "b")
    ]

    def tell(event, **values):
        told.append({"event": event, **values})

    llm = Validated(Restarting(Dying(), 2, tell), [NoA()], 2, tell)
    assert len(list(llm.answer_each(asks))) == 2
    assert told == [
        {"event": "retried", "id": "a", "number": 1, "check": "no_a", "why": "it has an a"},
        {"event": "engine_restarted", "reason": "killed", "num_items": 1},
    ]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("stream", "is_shown", "has_lines"),
    [
        (io.StringIO, None, True),
        (Terminal, None, False),
        (io.StringIO, True, False),
        (io.StringIO, False, False),
    ],
)
def test_lines_come_where_stderr_is_no_terminal(run, monkeypatch, stream, is_shown, has_lines):
    stderr = stream()
    monkeypatch.setattr(sys, "stderr", stderr)
    run("bad", "slow", "slow 2", use_tqdm=is_shown)
    lines = [
        line for line in stderr.getvalue().splitlines() if "items/s, " in line and " left; " in line
    ]
    assert bool(lines) == has_lines
    if has_lines:
        assert any("0 done, 1 failed, 2 left; " in line for line in lines)


def test_a_line(run):
    values = {
        **{"num_done": 118, "num_failed": 2, "outcomes": {"empty": 1}, "num_left": 1406},
        **{"unit": "image", "items_per_second": 3.1, "tokens_per_second": 410.2},
        "seconds_left": 455.4,
    }
    words = "118 done, 2 failed, 1 empty, 1406 left; 3.10 images/s, 410 tokens/s; 7 min 35 s to go"
    assert line_of(values) == words
    unknown = line_of({**values, "num_left": None, "seconds_left": None})
    assert unknown == "118 done, 2 failed, 1 empty; 3.10 images/s, 410 tokens/s"


def test_while_the_model_loads_that_is_told(monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    with ProgressReporter(ProgressOptions(seconds=0.01)):
        until(stderr.getvalue)
    assert re.match(r"loading, [\d.]+ s so far\n", stderr.getvalue())
    assert not any(thread.name == "progress" for thread in threading.enumerate())


@pytest.mark.parametrize(("columns", "has_lines"), [(80, False), (0, True)])
def test_a_terminal_without_columns_gets_lines(monkeypatch, columns, has_lines):
    """Containers have such terminals, on which a bar has no width."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with open(theirs, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with ProgressReporter(ProgressOptions(seconds=0.01)):
            is_shown = bool(select.select([ours], [], [], 60 if has_lines else 0.05)[0])
        assert is_shown == has_lines
        assert not is_shown or os.read(ours, 100).startswith(b"loading")
    os.close(ours)


@pytest.mark.parametrize("stream", [None, "closed"])
def test_without_any_stderr_nothing_breaks(run, monkeypatch, stream):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed if stream else None)
    with ProgressReporter(ProgressOptions(seconds=0.01)):
        time.sleep(0.03)


@pytest.mark.parametrize("content", ['{"id": 1}\n', "[1]\n", "text\n", "\x00\x01", '"event"\n'])
def test_files_of_others_are_no_log(tmp_path, content):
    path = tmp_path / "photo.jpg"
    path.write_text(content)
    with pytest.raises(ConfigError, match="is no log of events"):
        EventLog(path)
    assert path.read_text() == content


def test_what_cannot_be_written_is_an_error_before_anything_is_loaded(tmp_path):
    os.mkfifo(tmp_path / "nobody-reads")
    rows = [{"prompt": "a"}]
    for name in ("", "gone/log.jsonl", "nobody-reads"):
        progress = ProgressOptions(log_json=tmp_path / name)
        job = plan_batch(rows, tmp_path / "out.jsonl", BatchSettings(progress=progress))
        with pytest.raises(ConfigError, match="cannot be written"):
            run_batch(job, lambda: pytest.fail("it was loaded"))
    with pytest.raises(ConfigError, match="must be positive"):
        ProgressOptions(seconds=0)


@pytest.mark.full
def test_the_log_is_apart_from_input_and_output(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    out = tmp_path / "out.jsonl"
    (tmp_path / "link.jsonl").symlink_to(out)
    for name in ("in.jsonl", "out.jsonl", "link.jsonl", "out.jsonl.state.json"):
        settings = BatchSettings(progress=ProgressOptions(log_json=tmp_path / name))
        with pytest.raises(ConfigError):
            plan_batch(tmp_path / "in.jsonl", out, settings)
    assert not out.exists()


def test_a_log_that_cannot_be_written_any_more_ends_and_the_run_goes_on(tmp_path, caplog):
    reader, writer = os.pipe()
    log = EventLog(f"/dev/fd/{writer}")
    log.write("a", {"odd": "\ud800", "value": object})
    assert json.loads(os.read(reader, 1000))["odd"] == "\ud800"
    os.close(reader)
    os.close(writer)
    log.write("b", {})
    log.write("c", {})
    log.close()
    assert caplog.text.count("it ends here, the run goes on") == 1


def test_lines_of_several_threads_stay_whole(tmp_path):
    log = EventLog(tmp_path / "log")
    many = [threading.Thread(target=log.write, args=("e", {"long": "x" * 9000})) for _ in range(20)]
    for thread in many:
        thread.start()
    for thread in many:
        thread.join()
    log.close()
    lines = (tmp_path / "log").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["e"] * 20


def test_shards_are_told_apart(tmp_path):
    from mmdeploy_llm.data.records.ids import Selection

    settings = BatchSettings(selection=Selection(shard=2, num_shards=3), use_tqdm=False)
    log = tmp_path / "log"
    settings = replace(settings, progress=ProgressOptions(log_json=log))
    run_batch(plan_batch([{"prompt": "a"}] * 3, tmp_path / "out.jsonl", settings), Model)
    assert {json.loads(line)["shard"] for line in log.read_text().splitlines()} == {"2/3"}
