"""When the plugin is loaded, what that costs, and what is said where it is not."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from mmdeploy_llm.cli import app
from mmdeploy_llm.data.outputs.opening.choose import open_sink
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import PluginManager
from tests.data.outputs.vectors import made, written

WRITES = """
import sys
from mmdeploy_llm.data.outputs.opening.choose import open_sink
from mmdeploy_llm.data.outputs.scan import Kept
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.hooks import PluginManager

kinds = PluginManager.load(plugins=(), core=True).kinds
sink = open_sink(sys.argv[1], kinds=kinds)
with sink.writer("new", Kept()) as writer:
    writer.write(Record(id="a", line=1, text="x"), 1)
    writer.finish(lambda record: record.line)
HERE = "mmdeploy_llm_plugins.outputs."
print(*(own for own in sys.modules if own == "torch" or own.startswith(HERE)))
"""


@pytest.mark.parametrize(("name", "loaded"), [("out.jsonl", []), ("out.tar", ["tars"])])
def test_a_format_is_imported_where_it_is_written(tmp_path, name, loaded):
    command = [sys.executable, "-c", WRITES, str(tmp_path / name)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"mmdeploy_llm_plugins.outputs.{own}" for own in loaded]


def names_of(kinds):
    return [own.spec.name for own in kinds.output_formats]


def test_the_formats_are_there_where_other_plugins_are_named():
    own = names_of(PluginManager.load(plugins=("sources",), core=True).kinds)
    assert own == ["jsonl", "csv", "openai", "parquet", "webdataset", "npy", "lance"]
    without = PluginManager.load(plugins=("sources",), core=True, blocked=("outputs",)).kinds
    assert names_of(without) == own[:4]


@pytest.mark.parametrize(
    ("name", "form", "words"),
    [
        ("out.tar", None, "'out.tar': the format webdataset is that of plugin 'outputs'"),
        ("out", "npy", "'out': the format npy is that of plugin 'outputs'"),
        ("out.lance", None, "take 'outputs' out of blocked_plugins"),
    ],
)
def test_a_plugin_that_is_blocked_is_named(name, form, words):
    kinds = PluginManager.load(plugins=(), core=True, blocked=("outputs",)).kinds
    with pytest.raises(ConfigError, match=words):
        open_sink(name, form, kinds=kinds)


@pytest.mark.parametrize("name", ["v.npy", "v.npy/part-00000.npy", "v.tar", "v.tar/part-00000.tar"])
def test_commands_name_the_plugin_of_what_they_cannot_read(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    suffix = name[1:5]
    for own in (suffix, ".jsonl"):
        written(tmp_path / f"v{own}", [made(1), made(2)])
    search = ("search", name, "--like", "item 1")
    assert CliRunner().invoke(app, search).exit_code == 0
    monkeypatch.setenv("MMDEPLOY_LLM_BLOCKED_PLUGINS", "outputs")
    for words in (
        search,
        ("export", name, "-o", "back.jsonl"),
        ("export", "v.jsonl", "-o", f"other{suffix}"),
        ("report", name, "-o", "page.html"),
    ):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2, (words, done.output)
        told = " ".join(done.output.split())
        assert "plugin 'outputs'" in told, (words, told)
        assert "blocked_plugins" in told, (words, told)
