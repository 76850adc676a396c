"""Errors name the options of the command, not the arguments of the library."""

import errno
import logging

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from mmdeploy_llm.cli.engines import say_what_starts
from mmdeploy_llm.cli.exits import in_options, on_the_command_line
from mmdeploy_llm.cli.program import app, words_of
from mmdeploy_llm.data.records.files import OutputWriteError
from mmdeploy_llm.errors import ConfigError

CAPTION = get_command(app).commands["caption"]


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        (
            "prune needs resume: a new output has none",
            "--prune needs --resume: a new output has none",
        ),
        ("part_items is for an output of parts", "--part-items is for an output of parts"),
        ("journal is for an output at a URL", "--journal is for an output at a URL"),
        ("exclude, animated and prune are for x", "--exclude, --animated and --prune are for x"),
        (
            "resume and overwrite contradict each other",
            "--resume and --overwrite contradict each other",
        ),
        (
            "random items need a number: give limit too",
            "random items need a number: give --limit too",
        ),
        (
            "random_seed has an effect only with random",
            "--random-seed has an effect only with --random",
        ),
        ("EngineConfig.image_tokens: must be", "--image-tokens: must be"),
        ("EngineConfig.max_model_len: must be", "EngineConfig.max_model_len: must be"),
        ("of another: sampling_params.max_tokens is 1", "of another: --max-tokens is 1"),
        (
            "other: image_tokens is 'auto', was not set",
            "other: --image-tokens is 'auto', was not set",
        ),
        # What is quoted, a path, a value or said of Python stays, and so do other words.
        *(
            (same, same)
            for same in (
                "there is no column 'part_items'; the columns are 'on_existing'",
                "give --max-failures (in Python max_failures and sidecar())",
                "/a/part_items.csv cannot be read: give only_this, part_items=3",
                "the output has no order, and the engine needs a limit",
                "--part-items is for an output of parts",
                "model.part_items is unknown",
                "",
            )
        ),
    ],
)
def test_names_become_options(message, wanted):
    assert in_options(message, CAPTION) == wanted


def test_without_a_command_a_message_stays():
    assert in_options("part_items is for an output of parts", None) == (
        "part_items is for an output of parts"
    )


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--part-items", "3"), "error: --part-items is for an output of parts"),
        (("--prune",), "error: --prune needs --resume"),
        (("--journal", "x"), "error: --journal is for an output at a URL"),
        (("--image-tokens", "many"), "error: --image-tokens"),
        (("--sidecar", ".txt", "--on-existing", "keep"), "error: --on-existing must be one of"),
        (("--dedupe", "names"), "error: --dedupe must be one of bytes, pixels"),
    ],
)
def test_the_program_names_its_options(tmp_path, monkeypatch, png, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").write_bytes(png)
    done = CliRunner().invoke(app, ["caption", "a.png", *words])
    assert done.exit_code == 2
    assert done.stderr.startswith(message)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_is_told_at_once_which_model_starts(monkeypatch, capsys, is_terminal):
    """A file or a pipe in place of the terminal gets no such line."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    say_what_starts("models/some")
    assert capsys.readouterr().err == ("starting models/some ...\n" if is_terminal else "")


def test_options_of_the_program_may_stand_after_a_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in (["caption", "nowhere", "--debug"], ["--debug", "caption", "nowhere"]):
        assert isinstance(CliRunner().invoke(app, words).exception, ConfigError)
    root = logging.getLogger()
    before = root.level
    try:
        root.setLevel(logging.WARNING)
        assert CliRunner().invoke(app, ["caption", "nowhere", "-v"]).exit_code == 2
        assert root.level == logging.INFO
    finally:
        root.setLevel(before)
    done = CliRunner().invoke(app, ["caption", "nowhere", "--verbos"])
    assert "--verbose" in done.stderr  # click's hint names it


def test_a_dict_that_is_to_be_given_is_written_for_a_shell():
    message = "Too many image items in prompt; raise it with limit_mm_per_prompt={'image': 3}"
    assert on_the_command_line(message) == (
        "Too many image items in prompt; raise it with "
        "--engine 'limit_mm_per_prompt={\"image\": 3}'"
    )
    for stays in ("--engine 'limit_mm_per_prompt={\"image\": 100}'", "seed={x}", "a {'b': 1}"):
        assert on_the_command_line(stays) == stays


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OutputWriteError(errno.ENOSPC, "'a' is full: make space"), "'a' is full: make space"),
        (OutputWriteError(errno.ENOSPC, "No space", "a"), "'a': No space; make room there"),
        (OSError(errno.ENOSPC, "No space"), "No space; make room there"),
        (ConfigError("words"), "words"),
    ],
)
def test_what_to_do_is_said_once(error, words):
    assert words_of(error).partition(", or name")[0] == words
