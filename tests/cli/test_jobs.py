"""Job files hold everything that the command line holds, and come from it."""

import io
import os
import tomllib

import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from mmdeploy_llm.cli.options import job_file as jobs
from mmdeploy_llm.cli.program import app

GROUP = typer.main.get_group(app)
ODD = 'a "b" \\ c = é\n\x7f\t☃'


def options():
    for command in ("caption", "batch"):
        for param in GROUP.commands[command].params:
            if param.name not in ("save_job", "help"):
                yield pytest.param(command, param, id=f"{command}-{param.name}")


def sample_words(param, text):
    """Returns words that give the parameter a value."""
    if param.param_type_name == "argument":
        return [text, "-z"] if param.nargs == -1 else [text]
    if param.is_flag:
        return [param.secondary_opts[0] if param.secondary_opts else max(param.opts, key=len)]
    return [f"{max(param.opts, key=len)}={each}" for each in [text, "-n"][: 1 + param.multiple]]


def parsed(command, words):
    parent = GROUP.make_context("mmdeploy-llm", [command, "x"], resilient_parsing=True)
    return GROUP.commands[command].make_context(command, words, parent=parent)


@pytest.mark.one_is_quick
@pytest.mark.parametrize(("command", "param"), [*options()])
def test_every_option_and_argument_comes_back(command, param, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("3", "-n") if param.name == "plugin" else ():  # files, which must be there
        (tmp_path / name).touch()
    if param.name == "model":
        (tmp_path / "3").mkdir()
    needed = [] if command == "caption" or param.name == "output" else ["-o", "out.jsonl"]
    is_argument = param.param_type_name == "argument"
    for text in (ODD, "3"):  # a number where no text is one
        own = sample_words(param, text)
        words = [*needed, *([] if is_argument else own), "--", *(own if is_argument else ["a.png"])]
        try:
            ctx = parsed(command, words)
            break
        except Exception:
            if text != ODD:
                raise
    jobs.save_job(ctx, tmp_path / "job.toml")
    job = jobs.read_job("job.toml")
    assert job.pop("command") == command
    again = parsed(command, jobs.all_words(GROUP.commands[command], ctx.parent, job, []))
    assert again.params == ctx.params
    assert param.name in job


@pytest.fixture
def planned(monkeypatch):
    """The list of jobs that the program has planned and not run."""
    found = []
    name = "mmdeploy_llm.cli.commands.batches.run_and_report"
    monkeypatch.setattr(name, lambda job, *_, **__: found.append(job))
    return found


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder with photos/a.png and question.txt; the program runs elsewhere."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    (tmp_path / "work" / "photos").mkdir(parents=True)
    (tmp_path / "work" / "photos" / "a.png").write_bytes(buffer.getvalue())
    (tmp_path / "work" / "question.txt").write_text("What?\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "work"


def invoke(*words):
    return CliRunner().invoke(app, [*map(str, words)])


def test_a_job_runs_in_its_own_folder_and_later_options_win(work, planned):
    (work / "job.toml").write_text(
        'command = "caption"\npaths = ["photos"]\nprompt = "@question.txt"\nmax-tokens = 9\n'
        'engine = {seed = 3, revision = "12"}\nsampling = {top_k = 3}\nno_report = true\n'
    )
    done = invoke("run", work / "job.toml", "--max-tokens", "7", "--limit", "1")
    assert done.exit_code == 0, done.output
    settings = planned[0].settings
    assert settings.question == "What?"
    assert (settings.sampling_params.max_tokens, settings.sampling_params.top_k) == (7, 3)
    assert settings.selection.limit == 1
    assert planned[0].source.total == 1
    assert os.getcwd() == str(work)


def test_a_job_that_is_saved_elsewhere_runs_where_it_was_given(work, planned, monkeypatch):
    monkeypatch.chdir(work)
    (work / "jobs").mkdir()
    words = ("photos", "-p", "@question.txt", "--engine", "seed=3")
    assert invoke("caption", *words, "--save-job", "jobs/a.toml").exit_code == 0
    text = (work / "jobs" / "a.toml").read_text()
    assert tomllib.loads(text) == {
        "command": "caption",
        "folder": "..",
        "paths": ["photos"],
        "prompt": "@question.txt",
        "engine": ["seed=3"],
        "model": "shapes-vl",  # of MMDEPLOY_LLM_MODEL, which another shell may not have
    }
    monkeypatch.chdir("/")
    assert invoke("run", work / "jobs" / "a.toml").exit_code == 0
    first, second = planned
    assert second.settings.configuration().values == first.settings.configuration().values
    assert [item.id for item in second.source] == [item.id for item in first.source]


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('paths = ["photos"]', 'has no command; write command = "caption"'),
        (
            'command = "captoin"',
            "command must be one of caption, batch, read, embed, got 'captoin'",
        ),
        ("command = [", "is not TOML"),
        ('command = "caption"\npromt = "x"', "'promt' is no option of this command; did you mean"),
        ('command = "caption"\npaths = "photos"\ncolumns = "a"', "'columns' is no option"),
        ('command = "caption"\npaths = "photos"\nresume = "yes"', "resume must be true or false"),
        ('command = "caption"\npaths = "photos"\nprompt = ["a", "b"]', "must be one value"),
        ('command = "caption"\npaths = "photos"\nlimit = "many"', "'--limit'"),
        ('command = "caption"\npaths = "photos"\nlimit = 0', "'--limit'"),
        ('command = "caption"\npaths = "photos"\nmax_tokens = true', "must be a text or a number"),
        ('command = "caption"\npaths = [1979-05-27]', "must be a text or a number"),
        ('command = "caption"\npaths = "photos"\nlimit = 1\n"li-mit" = 1', "'li-mit' is no option"),
        ('command = "caption"\npaths="photos"\nmax_tokens=1\nmax-tokens=2', "is given twice"),
        ('command = "caption"\npaths = "photos"\nsave_job = "x"', "'save_job' is no option"),
        ('command = "caption"\npaths = "photos"\nfolder = "nowhere"', "No such file"),
        ('command = "caption"\npaths = "photos"\nfolder = 3', "folder must be a text"),
        ('command = "caption"', "give PATHs"),
        ('command = "batch"\ninput = "in.jsonl"', "Missing option '--output'"),
        ('command = "caption"\npaths = "photos"\nengine = {seed = 1979-05-27}', "no value of JSON"),
    ],
)
def test_a_wrong_job_is_one_line_that_names_it(work, planned, text, message):
    (work / "job.toml").write_text(text)
    done = invoke("run", work / "job.toml")
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert "job.toml" in done.stderr or message == "give PATHs"  # an error of the command itself
    assert done.stderr.startswith("error: ")
    assert planned == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("validate_retries = 2", "has an effect only with"),
        ("sampling = {max_tokens = 9}\nmax_tokens = 1024", "give one of them"),
    ],
)
def test_what_a_job_gives_with_its_default_is_given(work, planned, line, message):
    (work / "job.toml").write_text(f'command = "caption"\npaths = "photos"\n{line}\n')
    done = invoke("run", work / "job.toml")
    assert done.exit_code == 2
    assert message in done.stderr
    assert planned == []


def test_arguments_cannot_follow_and_wrong_options_are_told(work, planned):
    (work / "job.toml").write_text('command = "caption"\npaths = "photos"\n')
    done = invoke("run", work / "job.toml", "more")
    assert "only options can follow the job" in done.stderr
    done = invoke("run", work / "job.toml", "--promt", "x")
    assert done.exit_code == 2
    assert "--prompt" in done.stderr
    assert invoke("run", "nowhere.toml").exit_code == 2
    assert planned == []


@pytest.mark.full
def test_a_file_that_is_no_job_is_not_replaced(work, planned):
    for name in ("question.txt", "photos"):
        done = invoke("caption", work / "photos", "--save-job", work / name)
        assert done.exit_code == 2
    assert (work / "question.txt").read_text() == "What?\n"
    done = invoke("caption", work / "photos", "--save-job", work / "no" / "job.toml")
    assert "cannot be written" in done.stderr
    assert planned == []
