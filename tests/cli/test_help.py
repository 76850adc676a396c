"""--help fits two screens and begins with examples; an option is given once."""

import subprocess
import sys
from importlib.metadata import version

import pytest
import typer
from typer.testing import CliRunner

from mmdeploy_llm.cli.options.command import NUM_EXAMPLES, TWO_SCREENS
from mmdeploy_llm.cli.program import app

WIDTH = 100  # columns


def commands():
    found = {}
    for name, command in typer.main.get_group(app).commands.items():
        found[(name,)] = command
        for inner in getattr(command, "commands", {}):
            found[(name, inner)] = command.commands[inner]
    return found


COMMANDS = commands()


def shown(*words):
    done = CliRunner().invoke(app, [*words], terminal_width=WIDTH)
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


@pytest.mark.one_is_quick
@pytest.mark.parametrize("words", [(), *COMMANDS], ids=" ".join)
def test_help_fits_two_screens_and_begins_with_three_examples(words):
    text = shown(*words, "--help")
    assert len(text) <= TWO_SCREENS, "declare an option that is rarely used as `hidden`"
    assert max(map(len, text)) <= WIDTH
    begin = text.index("Examples:")
    assert begin < 6
    path = " ".join(("mmdeploy-llm", *words[:-1]))
    for line in text[begin + 1 : begin + 1 + NUM_EXAMPLES]:
        assert path in line
    assert text[0].startswith("Usage: ")


@pytest.mark.parametrize("command", ["caption", "batch"])
def test_the_usual_options_stand_on_one_line_each_and_all_in_help_all(command):
    usual, whole = shown(command, "--help"), shown(command, "--help-all")
    assert not any(line.startswith(" " * 20) for line in usual)
    for option in COMMANDS[(command,)].params:
        if option.param_type_name == "option":
            name = max(option.opts, key=len)
            assert any(name in line for line in whole), name
            assert option.hidden or any(name in line for line in usual), name
    hidden = [option for option in COMMANDS[(command,)].params if getattr(option, "hidden", 0)]
    assert usual[-1].endswith(f"--help-all: {len(hidden)} more options, whole texts, notes")
    assert any("Exit codes" in line for line in whole)


def test_options_are_listed_by_theme():
    text = shown("caption", "--help")
    assert "Options:" not in text, "give the group a title"
    titles = [line for line in text if line.endswith(":") and not line.startswith(" ")]
    assert len(titles) == len(set(titles)) > 6
    for title, option in (
        ("Output:", "--output"),
        ("Model:", "--model"),
        ("Run:", "--save-job"),
    ):
        below = text[text.index(title) + 1 :]
        end = next(n for n, line in enumerate(below) if not line.startswith(" "))
        assert any(option in line for line in below[:end])


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("caption", "x", "-p", "one", "--prompt", "two"), "--prompt"),
        (("caption", "x", "-o", "a.jsonl", "-o", "b.jsonl"), "--output"),
        (("batch", "x", "-o", "a.jsonl", "--max-tokens", "3", "--max-tokens=4"), "--max-tokens"),
        (("generate", "x", "--thinking", "--no-thinking"), "--thinking / --no-thinking"),
        (("report", "x", "-m", "a", "-m", "b"), "--model"),
        (("quantize", "a", "b", "--scheme", "int8", "--scheme", "int4"), "--scheme"),
        (("plugins", "new", "a", "--kind", "model", "--kind", "parser"), "--kind"),
    ],
)
def test_an_option_with_one_value_is_given_once(words, name):
    done = CliRunner().invoke(app, [*words])
    assert done.exit_code == 2
    assert f"{name} is given twice" in " ".join(done.output.split())


def test_what_may_be_repeated_and_flags_that_say_the_same_pass(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("--overwrite", "--overwrite", "--engine", "a=1", "--engine", "b=2")
    done = CliRunner().invoke(app, ["caption", "nowhere", *words])
    assert "given twice" not in done.output


def test_completion_is_installed_by_an_option():
    assert any("--install-completion" in line for line in shown("--help"))


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "mmdeploy_llm", "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"{version('mmdeploy-llm')}\n")
