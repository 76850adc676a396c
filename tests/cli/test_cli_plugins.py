"""The commands `plugins list`, `plugins check` and `plugins new`."""

import json

import pytest
from typer.testing import CliRunner

from mmdeploy_llm import cli, testing
from mmdeploy_llm.hooks import ModelSpec, PluginManager, ReasoningParserSpec, hookimpl
from mmdeploy_llm.hooks.validation import PROVIDED
from mmdeploy_llm.testing import Verdict


class Acme:
    @hookimpl
    def provide_models(self):
        names = ("AcmeForCausalLM", "AcmeMoeForCausalLM")
        return [ModelSpec(name="acme", architectures=names, factory="json:loads", reasoning="a")]

    @hookimpl
    def provide_reasoning_parsers(self):
        return [ReasoningParserSpec(name="a", factory="json:loads")]

    @hookimpl
    def on_step(self):
        pass


class Broken:
    @hookimpl
    def provide_models(self):
        return []

    @hookimpl
    def extend_cli(self, app):
        raise RuntimeError("no commands today")


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Returns a function that runs `plugins` in an empty folder with `acme` and `broken` only."""
    manager = PluginManager()
    manager.register(Acme(), "acme")
    manager.register(Broken(), "broken")
    monkeypatch.setattr(cli.program, "load_plugins", lambda *args: manager)
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(cli.app, ["plugins", *words])


class TestList:
    @pytest.mark.parametrize("words", [(), ("list",)])
    def test_both_ways_to_call_it(self, run, words):
        result = run(*words)
        assert result.exit_code == 0
        for text in ("AcmeForCausalLM, AcmeMoeForCausalLM", "reasoning parser a", "hook on_step"):
            assert text in result.stdout
        assert "no commands today" in result.stdout

    @pytest.mark.parametrize("words", [("--json",), ("list", "--json")])
    def test_json_has_the_specs_in_full(self, run, words):
        acme, broken = json.loads(run(*words).stdout)
        (model,) = acme["models"]
        assert model["architectures"] == ["AcmeForCausalLM", "AcmeMoeForCausalLM"]
        assert [parser["name"] for parser in acme["reasoning_parsers"]] == ["a"]
        assert acme["media_processors"] == broken["models"] == []
        groups = {hook.removeprefix("provide_") for hook in PROVIDED}
        assert groups <= acme.keys()
        assert {"output_sinks", "attention_backends", "weight_formats"} <= groups
        assert broken["failures"][0]["error"] == "RuntimeError: no commands today"

    def test_strict(self, run):
        assert run("list", "--strict").exit_code == run("--strict").exit_code == 1

    def test_markdown(self, run):
        rows = run("list", "--markdown").stdout.splitlines()
        assert rows[2] == "| `AcmeForCausalLM` | `acme` | `acme` | text | `a` |  |  |"
        assert len(rows) == 4

    def test_an_unknown_subcommand_is_a_usage_error(self, run):
        assert run("lst").exit_code == 2


FILE = """
from mmdeploy_llm.hooks import ReasoningParserSpec, hookimpl

@hookimpl
def provide_reasoning_parsers():
    return [ReasoningParserSpec(name="qwen3", factory="mmdeploy_llm.testing.fakes:Echo")]
"""


class TestFiles:
    """Single files, with the real loader."""

    @pytest.fixture
    def run(self, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "my.py").write_text(FILE)
        return lambda *words: CliRunner().invoke(cli.app, ["plugins", *words])

    @pytest.mark.full
    @pytest.mark.one_is_quick
    @pytest.mark.parametrize("words", [(), ("list",)])
    def test_who_serves(self, run, tmp_path, words):
        result = run(*words, "--plugin", "my.py")
        assert result.exit_code == 0
        assert "reasoning parser qwen3 is served by 'my.py'" in " ".join(result.stdout.split())
        found = {
            each["name"]: each for each in json.loads(run("--plugin", "my.py", "--json").stdout)
        }
        assert found["my.py"]["module"] == str(tmp_path / "my.py")
        assert found["my.py"]["served_by_others"] == []
        assert found["reasoning"]["served_by_others"] == [
            "reasoning parser qwen3 is served by 'my.py'"
        ]

    def test_another_choice(self, run):
        result = run("list", "--plugin", "my.py", "--use", "qwen3=reasoning", "--json")
        found = {each["name"]: each for each in json.loads(result.stdout)}
        assert found["my.py"]["served_by_others"] == [
            "reasoning parser qwen3 is served by 'reasoning'"
        ]

    def test_what_is_wrong(self, run, tmp_path):
        assert run("list", "--plugin", "no.py").exit_code == 2
        (tmp_path / "my.py").write_text("x = (")
        result = run("list", "--plugin", "my.py")
        assert result.exit_code == 2
        assert "(my.py, line 1)" in result.stderr
        assert run("list", "--use", "qwen3=acne").exit_code == 2

    @pytest.mark.full  # fresh processes import the file
    def test_check(self, run):
        result = run("check", "./my.py")
        assert "reasoning parser qwen3 is served by 'my.py', not by 'reasoning'" in result.stdout
        assert "fail  factories_can_be_imported" in result.stdout
        assert result.exit_code == 1
        assert run("check", "./no.py").exit_code == 2


VERDICTS = (
    Verdict(check="registers", subject="", outcome="pass", message="", seconds=0.1),
    Verdict(check="builds", subject="model acme", outcome="skip", message="no folder", seconds=0),
    Verdict(check="splits", subject="parser a", outcome="fail", message="hold it", seconds=2.5),
)


class TestCheck:
    @pytest.fixture
    def checks(self, monkeypatch):
        """Returns a function that replaces the checks, which have their own tests, and returns the
        list of their calls."""
        asked = []

        def check(verdicts):
            def check_plugin(name, *, model_folder=None, plugin_files=()):
                asked.append((name, model_folder, *plugin_files))
                yield from verdicts

            monkeypatch.setattr("mmdeploy_llm.testing.check.check_plugin", check_plugin)
            monkeypatch.setattr(
                "mmdeploy_llm.testing.plugins.installed.check_name", lambda name: None
            )
            return asked

        return check

    def test_a_line_for_each_verdict(self, run, checks, tmp_path):
        asked = checks(VERDICTS)
        result = run("check", "acme", "--model", str(tmp_path))
        assert asked == [("acme", tmp_path)]
        assert result.exit_code == 1
        assert result.stdout.splitlines() == [
            "pass  registers",
            "skip  model acme: builds",
            "      no folder",
            "fail  parser a: splits (2.5 s)",
            "      hold it",
            "acme: 1 passed, 1 failed, 1 skipped",
        ]

    def test_json(self, run, checks):
        checks(VERDICTS)
        result = run("check", "acme", "--json")
        assert result.exit_code == 1
        found = json.loads(result.stdout)
        assert [item["outcome"] for item in found] == ["pass", "skip", "fail"]
        assert found[2]["message"] == "hold it"

    def test_all_good(self, run, checks):
        checks(VERDICTS[:2])
        assert run("check", "acme").exit_code == 0

    def test_a_missing_folder_is_a_usage_error(self, run, checks):
        checks(())
        assert run("check", "acme", "--model", "nowhere").exit_code == 2


class TestNew:
    @pytest.mark.one_is_quick
    @pytest.mark.parametrize("kind", ["model", "parser", "processor", "model --media image"])
    def test_files_and_next_steps(self, run, tmp_path, kind):
        result = run("new", "acme", "--kind", *kind.split())
        assert result.exit_code == 0
        assert (tmp_path / "acme-llm" / "pyproject.toml").is_file()
        said = [line.strip() for line in result.stdout.splitlines()]
        assert "pyproject.toml" in said
        assert said[-4:] == [
            "cd acme-llm",
            'pip install -e ".[test]"',
            "pytest",
            "mmdeploy-llm plugins check acme",
        ]

    def test_directory(self, run, tmp_path):
        run("new", "acme", "--kind", "parser", "--directory", "deep/er")
        assert (tmp_path / "deep/er/acme-llm/src/acme_llm/parser.py").is_file()

    @pytest.mark.one_is_quick
    @pytest.mark.parametrize(
        "words",
        [
            ("acme", "--kind", "parsr"),
            ("acme", "--kind", "parser", "--media", "image"),
            ("9", "--kind", "parser"),
            ("acme",),
            (),
        ],
    )
    def test_wrong_calls(self, run, tmp_path, words):
        result = run("new", *words)
        assert result.exit_code == 2
        assert list(tmp_path.iterdir()) == []

    def test_nothing_is_overwritten(self, run):
        run("new", "acme", "--kind", "parser")
        again = run("new", "acme", "--kind", "model")
        assert again.exit_code == 2
        assert "nothing is overwritten" in again.stderr


def test_the_kit_has_what_the_program_calls():
    assert testing.check_plugin.__kwdefaults__ == {"model_folder": None, "plugin_files": ()}
