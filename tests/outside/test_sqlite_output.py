"""An output in SQLite, in one file of a plugin: written, killed, resumed, retried, pruned, sharded,
reported and exported as the built-in formats are."""

import os
import shutil
import signal
import sqlite3
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmdeploy_llm.batch.job import plan_batch, run_batch
from mmdeploy_llm.batch.settings import BatchSettings
from mmdeploy_llm.cli import app
from mmdeploy_llm.data.files.options import FindingOptions
from mmdeploy_llm.data.outputs.opening.choose import open_sink
from mmdeploy_llm.data.outputs.opening.merged import MergedOutputs, open_existing
from mmdeploy_llm.data.records.files import OutputLostError, OutputWriteError
from mmdeploy_llm.data.records.ids import Selection
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import PluginManager
from tests.batch.conftest import FakeLLM, fake_llm, in_child, jsonl  # noqa: F401

EXAMPLES = Path(__file__).parents[2] / "examples"
PLUGIN = EXAMPLES / "plugins" / "sqlite_output.py"
NUM_ITEMS = 12


@pytest.fixture(scope="module")
def kinds():
    return PluginManager.load(plugins=(), files=[PLUGIN]).kinds


@pytest.fixture
def do(kinds, jsonl, tmp_path, fake_llm):  # noqa: F811
    """Runs a batch of prompts into out.sqlite."""
    prompts = ["bad" if n == 4 else f"q{n}" for n in range(NUM_ITEMS)]
    source = jsonl(*({"id": f"i{n}", "prompt": own} for n, own in enumerate(prompts)))

    def run(name="out.sqlite", llm=fake_llm, **options):
        settings = BatchSettings(finding=FindingOptions(table=kinds), **options)
        return run_batch(plan_batch(source, tmp_path / name, settings), lambda: llm)

    return run


def rows(path, what="id, outcome"):
    with sqlite3.connect(path) as database:
        found = database.execute(f"SELECT {what} FROM records ORDER BY id").fetchall()
    database.close()
    return found


WHOLE = sorted((f"i{n}", "failed" if n == 4 else "ok") for n in range(NUM_ITEMS))


def test_a_killed_run_is_resumed(do, tmp_path, fake_llm, in_child):  # noqa: F811
    def killed_at_the_seventh():
        real = fake_llm.answer

        def answer(prompt, n=1):
            if fake_llm.num_taken > 6:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(prompt, n)

        fake_llm.answer = answer
        do()

    assert in_child(killed_at_the_seventh) == -signal.SIGKILL
    before = rows(tmp_path / "out.sqlite", "id")
    assert len(before) == 6
    summary = do(mode="resume")
    assert rows(tmp_path / "out.sqlite") == WHOLE
    assert (summary.ending, summary.num_failed) == ("done", 1)
    assert fake_llm.num_taken == NUM_ITEMS - 5  # the failed one is done again
    assert do(mode="resume").num_failed == 1
    do(mode="overwrite")
    assert rows(tmp_path / "out.sqlite") == WHOLE


def test_shards_are_read_together(do, tmp_path, kinds):
    names = [tmp_path / f"s{shard}.db" for shard in (1, 2, 3)]
    for shard, path in enumerate(names, 1):
        do(path.name, selection=Selection(shard=shard, num_shards=3))
    merged = MergedOutputs([str(path) for path in names], kinds)
    assert sorted((record.id, record.outcome) for record in merged.records()) == WHOLE
    assert merged.missing() == {}
    with pytest.raises(ConfigError, match=r"outputs that end in \.db are not known.*--plugin"):
        MergedOutputs([str(names[0])])


def test_a_foreign_database_stays_as_it_is(do, tmp_path):
    with sqlite3.connect(tmp_path / "out.sqlite") as database:
        database.execute("CREATE TABLE mine (x)")
    database.close()
    before = (tmp_path / "out.sqlite").read_bytes()
    for mode in ("new", "resume", "overwrite"):
        with pytest.raises(ConfigError, match=r"exists already|cannot be read: output sink sqlite"):
            do(mode=mode)
    (tmp_path / "text.db").write_text("no database")
    with pytest.raises(ConfigError, match="file is not a database"):
        do("text.db", mode="overwrite")
    (tmp_path / "link.db").symlink_to("out.sqlite")
    with pytest.raises(ConfigError, match="a link or no file"):
        do("link.db", mode="overwrite")
    assert (tmp_path / "out.sqlite").read_bytes() == before


def test_what_goes_wrong_while_it_is_written(do, tmp_path, fake_llm):  # noqa: F811
    """A disk that is full, and a file that somebody removes, are told with what to do."""
    real, out = fake_llm.answer, tmp_path / "out.sqlite"

    def full(prompt, n=1):
        if fake_llm.num_taken == 6:
            with sqlite3.connect(out) as database:
                database.execute(
                    "CREATE TRIGGER IF NOT EXISTS full BEFORE INSERT ON records "
                    "BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END"
                )
            database.close()
        return real(prompt, n)

    fake_llm.answer = full
    with pytest.raises(OutputWriteError, match=r"plugin 'sqlite_output.py'.*is full; make space"):
        do()
    with sqlite3.connect(out) as database:
        database.execute("DROP TRIGGER full")
    database.close()
    fake_llm.answer = real
    do(mode="resume")
    assert rows(out) == WHOLE
    fake_llm.answer = lambda prompt, n=1: (out.unlink(missing_ok=True), real(prompt, n))[1]
    with pytest.raises(OutputLostError, match="was removed or replaced"):
        do(mode="overwrite")


def test_options_that_it_does_not_have(kinds, tmp_path):
    for name, options, message in (
        ("s3://bucket/x.sqlite", {}, "written on this machine"),
        ("x.sqlite", {"part_items": 3}, "part_items has no effect on the format sqlite of plugin"),
        ("x.sqlite", {"journal": "x"}, "journal has no effect"),
        ("x.odd", {}, r"ends in \.odd.*\.sqlite .*or give the format, one of .*sqlite"),
        ("x.jsonl", {"form": "sqlit"}, "the format must be one of .*sqlite"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_sink(name, kinds=kinds, **options)
    assert open_sink("x.odd", "sqlite", kinds=kinds).name == "x.odd"
    with pytest.raises(ConfigError, match="does not exist"):
        open_existing(str(tmp_path / "none.sqlite"), kinds)


def run(*words):
    result = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
    return result.exit_code, result.output


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for name, own in (("1", "picture-1.png"), ("2", "picture-5.png"), ("3", "picture-8.png")):
        shutil.copy(EXAMPLES / "images" / own, folder / f"picture-{name}.png")
    return folder


@pytest.mark.full
def test_who_writes_a_suffix_of_ours_is_told_once(do, photos, tmp_path, monkeypatch, caplog):
    """Each command that opens an output tells it, however often it looks at the name."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(PLUGIN.read_text().replace('(".sqlite", ".db")', '(".csv",)'))
    Path("files.txt").write_text("photos\n")
    monkeypatch.setattr("mmdeploy_llm.cli.commands.batches.start", lambda *args, **options: None)
    do("out.jsonl")
    made = ("-m", "shapes-vl", "--plugin", "mine.py")
    for words in (
        ("caption", photos, *made),
        ("batch", "--files-from", "files.txt", *made),
        ("batch", "in.jsonl", *made),
        ("export", "out.jsonl", "--plugin", "mine.py"),
    ):
        code, told = run(*words, "-o", "new.csv")
        assert (code, caplog.text.count(".csv outputs are written by")) == (0, 1), told
        caplog.clear()


@pytest.mark.full  # it runs the whole program ten times
def test_the_program(photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plugin = ("--plugin", PLUGIN)
    made = ("-m", "shapes-vl", "--max-tokens", 40, "--no-thinking", *plugin)
    code, told = run("caption", photos, "-o", "out.sqlite", *made)
    assert code == 0, told
    assert Path("out.html").exists()
    (photos / "picture-2.png").unlink()
    (photos / "picture-3.png").write_bytes(b"\x89PNG\r\n\x1a\n torn")
    code, told = run("caption", photos, "-o", "out.sqlite", "--resume", "--prune", *made)
    assert code == 1, told
    assert [outcome for _, outcome in rows("out.sqlite")] == ["ok", "failed"]
    shutil.copy(EXAMPLES / "images" / "picture-8.png", photos / "picture-3.png")
    code, told = run("caption", photos, "-o", "out.sqlite", "--resume", *made)
    assert (code, [outcome for _, outcome in rows("out.sqlite")]) == (0, ["ok", "ok"]), told
    code, told = run("export", "out.sqlite", "-o", "out.jsonl", *plugin)
    assert (code, "2 records in, 2 written" in told) == (0, True), told
    code, told = run("export", "out.jsonl", "-o", "back.db", *plugin)
    assert (code, rows("back.db")) == (0, rows("out.sqlite")), told
    code, told = run("report", "out.sqlite", "back.db", "-o", "all.html", *plugin)
    assert (code, "together: 2 items" in told) == (0, True), told
    assert run("export", "out.sqlite", "-o", "x.csv")[0] == 2
    assert "output sink sqlite" in run("plugins", "list", *plugin)[1]
