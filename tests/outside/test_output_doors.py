"""Where a plugin's format of outputs is seen: every command, chosen by files and by the
environment, under Ray too; and what writes without any plugin."""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmdeploy_llm.cli import app
from mmdeploy_llm.data.outputs.opening.choose import open_sink
from mmdeploy_llm.data.outputs.opening.merged import MergedOutputs
from mmdeploy_llm.data.outputs.own_formats import provide_output_sinks
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.hooks.validation import checked_specs
from mmdeploy_llm.testing.check import check_plugin
from mmdeploy_llm.testing.plugins import fresh
from tests.batch.conftest import fake_llm, jsonl  # noqa: F401

FILE = Path(__file__).parents[2] / "examples/plugins/sqlite_output.py"


def run(*words):
    result = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
    return result.exit_code, result.output


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs the plugin as a package named "tables"."""
    site = tmp_path / "site"
    info = site / "tables_llm-1.0.dist-info"
    info.mkdir(parents=True)
    shutil.copy(FILE, site / "tables_llm.py")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tables-llm\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mmdeploy_llm]\ntables = tables_llm\n")
    monkeypatch.syspath_prepend(str(site))


@pytest.fixture
def records(tmp_path, monkeypatch):
    """A file of records, in the working folder."""
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text(Record(id="a", line=1, text="a lamp").to_json() + "\n")


def texts(name):
    with closing(sqlite3.connect(name)) as database:
        return database.execute("SELECT text FROM records").fetchall()


@pytest.mark.full
def test_an_installed_one_is_seen_unless_the_environment_says_no(installed, records, monkeypatch):
    assert run("export", "in.jsonl", "-o", "out.sqlite")[0] == 0
    assert texts("out.sqlite") == [("a lamp",)]
    assert run("report", "out.sqlite", "-o", "page.html")[0] == 0
    monkeypatch.setenv("MMDEPLOY_LLM_BLOCKED_PLUGINS", "tables")
    code, told = run("export", "in.jsonl", "-o", "other.sqlite")
    assert (code, "other.sqlite" in told and "format" in told) == (2, True), told
    assert run("report", "out.sqlite", "-o", "page.html")[0] == 2
    monkeypatch.delenv("MMDEPLOY_LLM_BLOCKED_PLUGINS")
    monkeypatch.setenv("MMDEPLOY_LLM_PLUGINS", "sources")
    assert run("export", "in.jsonl", "-o", "other.sqlite")[0] == 2
    assert run("export", "in.jsonl", "-o", "other.sqlite", "--plugin", FILE)[0] == 0
    monkeypatch.setenv("MMDEPLOY_LLM_PLUGINS", "tables")
    assert run("export", "out.sqlite", "-o", "back.jsonl")[0] == 0
    assert json.loads(Path("back.jsonl").read_text())["text"] == "a lamp"


def test_a_batch_on_a_cluster_writes_it(jsonl, tmp_path, monkeypatch, fake_llm):  # noqa: F811
    """Records are written where the command runs: the machines of a cluster only answer."""
    monkeypatch.chdir(tmp_path)
    asked = []

    def opened(model, options, cluster):
        asked.append((cluster, options["plugin_files"]))
        return fake_llm

    monkeypatch.setattr("mmdeploy_llm.cli.running.open_answerer", opened)
    source = jsonl({"id": "a", "prompt": "q"})
    words = ("batch", source, "-o", "out.sqlite", "--plugin", FILE, "--ray", "local")
    code, told = run(*words)
    assert code == 0, told
    assert texts("out.sqlite") == [("a caption of q",)]
    assert asked == [("local", [FILE])]
    assert "nothing left to do" in run(*words, "--resume")[1]


def test_what_is_built_in_writes_and_reads_without_any_plugin(tmp_path):
    kinds = PluginManager.load(plugins=()).kinds
    own = provide_output_sinks()
    assert checked_specs("provide_output_sinks", own) == own
    assert [found.spec for found in kinds.output_formats] == list(own)
    for spec in own:
        open_sink(tmp_path / "out", spec.name, kinds=kinds).check("new")


def test_a_plugin_has_a_format_of_parts(tmp_path):
    """Parts, URLs, a part alone: all that the formats of parts of this package do."""
    (tmp_path / "rows_plugin.py").write_text(
        "from mmdeploy_llm.hooks import OutputSinkSpec, hookimpl\n"
        "@hookimpl\n"
        "def provide_output_sinks():\n"
        "    return [OutputSinkSpec(name='rows', suffixes=('.rows',), options=('part_items',),\n"
        "                           factory='mmdeploy_llm.data.outputs.lines:LineParts')]\n"
    )
    kinds = PluginManager.load(plugins=(), files=[tmp_path / "rows_plugin.py"]).kinds
    records = [Record(id=name, line=line, text="x") for line, name in enumerate("abc", 1)]
    for name in (f"{tmp_path}/out.rows", "memory://bucket/out.rows"):
        options = {} if "://" not in name else {"journal": tmp_path / "journal"}
        for some in (records[:2], records[2:]):
            sink = open_sink(name, part_items=2, kinds=kinds, **options)
            with sink.writer("resume", sink.scan(lambda record: record.line)) as writer:
                for record in some:
                    writer.write(record, record.line)
                writer.finish(lambda record: record.line)
        assert list(sink.parts().values()) == ["part-00000.rows", "part-00001.rows"]
        assert list(MergedOutputs([name], kinds).records()) == records
    part = f"{tmp_path}/out.rows/part-00001.rows"
    assert list(MergedOutputs([part], kinds).records()) == records[2:]


@pytest.mark.full
def test_plugins_check_checks_the_format():
    verdicts = [own for own in check_plugin(str(FILE)) if own.subject == "output sink sqlite"]
    assert len(verdicts) >= 8
    others = [own for own in verdicts if own.outcome != "pass"]
    assert [own.message for own in others] == [
        "records are not added at the end of a file: nothing can be torn",
        *["it is no format of parts"] * 3,
    ]


@pytest.mark.full
def test_plugins_check_finds_a_format_that_forgets(tmp_path, monkeypatch):
    monkeypatch.setattr(fresh, "changes_of", lambda modules: {})  # as of FILE, which has a test
    source = FILE.read_text().replace("yield from self", "yield from ()  #")
    (tmp_path / "forgets.py").write_text(source)
    verdicts = check_plugin(str(tmp_path / "forgets.py"))
    failed = [own for own in verdicts if own.outcome == "fail"]
    assert failed
    assert all(own.subject == "output sink sqlite" for own in failed), failed
