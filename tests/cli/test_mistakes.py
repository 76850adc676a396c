"""Mistakes on the command line are errors before anything is loaded."""

import json

import pytest
from typer.testing import CliRunner

from mmdeploy_llm.cli.commands.reports import expanded
from mmdeploy_llm.cli.doctor.examination import processor
from mmdeploy_llm.cli.program import app

HERE = ["caption", "a.png"]
BATCH = ["batch", "in.jsonl", "-o", "out.jsonl"]
TWICE = ["--sampling", "top_p=0.5", "--sampling", '{"top_p": 0.6}']


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mmdeploy_llm.cli.running.open_answerer", None)  # nothing is loaded
    (tmp_path / "a.png").write_bytes(b"x")
    (tmp_path / "in.jsonl").write_text('{"prompt": "one"}\n')
    (tmp_path / "in.lines").write_text('{"prompt": "one"}\n')
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "latin.txt").write_bytes(b"\xe9")


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*HERE, "-o", "x.jsn"], "'x.jsn' ends in .jsn, which names no format: known are .jsonl"),
        ([*HERE, "-o", "x.jsonl.gz"], "ends in .gz, which names no format"),
        ([*HERE, "-o", "captions"], "has no suffix, which names no format"),
        ([*HERE, "-o", "x.parquet", "--format", "jsonl"], "is parquet, and not jsonl"),
        (["batch", "in.lines", "-o", "out.jsonl"], "'in.lines' has an unknown suffix"),
        ([*HERE, "-p", "@nowhere.txt"], "--prompt: the file 'nowhere.txt' cannot be read"),
        ([*HERE, "-p", "@empty.txt"], "--prompt: 'empty.txt' has no text"),
        ([*HERE, "-p", ""], "--prompt has no text; give one, of a model that needs none a space"),
        ([*HERE, "-p", "@latin.txt"], "'latin.txt' is not UTF-8"),
        ([*HERE, "-p", "@/dev/zero"], "has more than 1000000 characters"),
        ([*HERE, "-p", "x", "--prompt-file", "a.png"], "--prompt and --prompt-file contradict"),
        ([*HERE, "--system", "@nowhere.txt"], "--system: the file 'nowhere.txt'"),
        ([*HERE, "--sampling", "nowhere.json"], "--sampling: the file 'nowhere.json' cannot"),
        ([*HERE, "--sampling", "list.json"], "must hold a JSON object"),
        ([*HERE, "--sampling", "{top_p: 1}"], "cannot be read as JSON"),
        ([*HERE, *TWICE], "--sampling gives top_p twice"),
        ([*HERE, "--sampling", "temperature=1", "--temperature", "0"], "give one of them"),
        ([*HERE, "--sampling", "max_tokens=9", "--max-tokens", "7"], "give one of them"),
        # What is given with its default is given.
        ([*HERE, "--sampling", "max_tokens=9", "--max-tokens", "1024"], "give one of them"),
        ([*HERE, "--engine", "image_tokens=9", "--image-tokens", "auto"], "contradict each other"),
        ([*HERE, "--validate-retries", "2"], "has an effect only with"),
        ([*HERE, "--resume", "--no-retry-failed", "--retry-failed", "all"], "contradict each"),
        ([*HERE, "--retry-failed", "all"], "each needs --resume"),
        ([*BATCH, "--animated", "image"], "this input is a corpus"),
        ([*BATCH, "--ray", "auto", "--engine-restarts", "2"], "leave it out with --ray"),
        ([*HERE, "--sampling", "tempratur=1"], "did you mean 'temperature'"),
        ([*HERE, "--engine", "dtype=float16", "--dtype", "float32"], "--engine dtype=... contrad"),
        ([*HERE, "--engine", "seed=1", "--engine", "seed=2"], "--engine gives seed twice"),
        ([*HERE, "--engine", "max_model_length=1"], "did you mean 'max_model_len'"),
        ([*HERE, "--engine", "max_model_len=no"], "max_model_len"),
        ([*HERE, "--validate-retries", "5"], "has an effect only with"),
        ([*HERE, "--no-report", "--report", "x.html"], "--report and --no-report contradict"),
        ([*HERE, "--resume", "--no-retry-failed", "--retry-failed", "408"], "contradict each"),
        ([*BATCH, "--prompt-file", "nowhere.txt"], "--prompt-file: the file 'nowhere.txt'"),
    ],
)
def test_it_is_told_before_anything_is_loaded(words, message, tmp_path):
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.output
    assert not list(tmp_path.glob("*.html"))


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--quantization", "int4"], "option: --quantization; give --engine quantization=VALUE"),
        (["--speculative=mtp"], "option: --speculative; give --engine speculative=VALUE"),
        (["--kv-cache-memory", "1"], "--kv-cache-memory; give --engine kv_cache_memory=VALUE"),
        (["--repetition-penalty", "2"], "give --sampling repetition_penalty=VALUE"),
    ],
)
def test_an_option_that_only_the_library_has_is_shown_where_it_is_given(words, hint):
    done = CliRunner().invoke(app, [*HERE, *words])
    assert (done.exit_code, hint in done.stderr) == (2, True), done.stderr
    assert "give --" not in CliRunner().invoke(app, [*HERE, "--nothing-known"]).stderr


@pytest.fixture
def planned(monkeypatch):
    """The list of jobs that the program has planned and not run."""
    jobs = []
    name = "mmdeploy_llm.cli.commands.batches.run_and_report"
    monkeypatch.setattr(name, lambda job, *_, **__: jobs.append(job))
    return jobs


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("words", "question"),
    [
        (["-p", "@ask.txt"], "What\nis it?"),
        (["--prompt-file", "ask.txt"], "What\nis it?"),
        (["-p", "@@home"], "@home"),
        (["-p", "-"], "from a pipe"),
        (["-p", "- a dash"], "- a dash"),
    ],
)
def test_a_question_may_stand_in_a_file(words, question, tmp_path, planned):
    (tmp_path / "ask.txt").write_text("What\nis it?\n")
    done = CliRunner().invoke(app, [*HERE, *words], input="from a pipe\n")
    assert done.exit_code == 0, done.output
    (item,) = planned[0].source
    assert item.prompt.messages[-1].text == question
    assert planned[0].settings.configuration().values["prompt"] == question


@pytest.mark.one_is_quick
@pytest.mark.parametrize("text", ["top_k=3", '{"top_k": 3}', "params.json", "@params.json"])
def test_sampling_takes_pairs_objects_and_files(text, tmp_path, planned):
    (tmp_path / "params.json").write_text('{"top-k": 3}')
    done = CliRunner().invoke(app, [*HERE, "--sampling", text, "--sampling", "min_p=0.1"])
    assert done.exit_code == 0, done.output
    params = planned[0].settings.sampling_params
    assert (params.top_k, params.min_p, params.temperature) == (3, 0.1, None)


def said(item):
    """Who says what."""
    return [(message.role, message.text) for message in item.prompt.messages]


def test_a_system_message_goes_before_the_question_and_a_lines_own_wins(tmp_path, planned):
    own = {"messages": [{"role": "system", "content": "mine"}, {"role": "user", "content": "x"}]}
    rows = [{"messages": [{"role": "user", "content": "x"}]}, own, {"prompt": "raw"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for words in (HERE, BATCH):
        done = CliRunner().invoke(app, [*words, "--system", "Be brief."])
        assert done.exit_code == 0, done.output
    (picture,) = planned[0].source
    assert said(picture)[0] == ("system", "Be brief.")
    first, second, third = planned[1].source
    assert said(first) == [("system", "Be brief."), ("user", "x")]
    assert said(second) == [("system", "mine"), ("user", "x")]
    assert third.message == "a system message is for messages, and this line has none"
    assert planned[1].settings.configuration().values["system"] == "Be brief."


def test_report_takes_globs(tmp_path):
    for name in ("shard-1.jsonl", "shard-2.jsonl", "shard-10.jsonl"):
        (tmp_path / name).write_text("")
    assert expanded(["shard-*.jsonl"]) == [
        "shard-1.jsonl",
        "shard-2.jsonl",
        "shard-10.jsonl",
    ]
    (tmp_path / "x[1].jsonl").write_text("")
    assert expanded(["x[1].jsonl", "s3://bucket/a*.jsonl"]) == [
        "x[1].jsonl",
        "s3://bucket/a*.jsonl",
    ]
    done = CliRunner().invoke(app, ["report", "none-*.jsonl"])
    assert done.exit_code == 2
    assert "no output fits 'none-*.jsonl'" in done.stderr


def test_doctor_counts_the_threads_that_an_engine_uses(monkeypatch):
    monkeypatch.setattr("mmdeploy_llm.kernels.cpu.own_choice", lambda *_: 7)
    assert "an engine computes in 7 threads, as OMP_NUM_THREADS" in processor().text
