"""The first line of a run: the model, the files and where results go, before torch is imported."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from mmdeploy_llm.cli import app
from mmdeploy_llm.cli.options.suggested import EXAMPLES, LACKS, suggested, suggestions
from mmdeploy_llm.data.files.counting import files_so_far
from mmdeploy_llm.system.portable.machine import free_ram
from mmdeploy_llm.testing.tiny import write_tiny

HEAVY = ("torch", "transformers")
# Runs the program, and notes which of the heavy modules there are when the first line is written.
NOTING = f"""
import io, json, os, sys
class Noting(io.StringIO):
    def isatty(self): return os.environ["IS_TERMINAL"] == "1"
    def write(self, text):
        super().write(text)  # it takes no bytes
        if text:
            heavy = [name for name in {HEAVY!r} if name in sys.modules]
            print(json.dumps([text, heavy]), flush=True)
            os._exit(0)
sys.stderr = Noting()
from mmdeploy_llm.cli import main
main()
"""


def first_line(folder, *words, is_terminal):
    """Returns the first text on stderr, and the heavy modules then, of a fresh process."""
    given = {**os.environ, "IS_TERMINAL": str(int(is_terminal))}
    done = subprocess.run(
        [sys.executable, "-c", NOTING, *words],
        cwd=folder, env=given, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[0])


@pytest.fixture
def folder(tmp_path, png):
    (tmp_path / "photos" / "more").mkdir(parents=True)
    for name in ("a.png", "b.png", "more/c.png", ".hidden.png"):
        (tmp_path / "photos" / name).write_bytes(png)
    return tmp_path


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("caption", "photos"),
            "starting shapes-vl with 3 files; results go to captions.jsonl and captions.html",
        ),
        (
            ("batch", "photos", "--output", "x.jsonl", "--no-report"),
            "starting shapes-vl with 3 files; results go to x.jsonl",
        ),
        (("caption", "photos", "--estimate", "2"), "starting shapes-vl with 3 files ..."),
        (
            ("caption", "photos", "--limit", "1", "--no-report"),
            "starting shapes-vl with 1 of 3 files; results go to captions.jsonl",
        ),
        (
            ("caption", "photos", "--resume", "--no-report"),
            "starting shapes-vl with 3 files, less those that are done; "
            "results go to captions.jsonl",
        ),
    ],
)
def test_it_is_written_before_torch_is_imported(folder, words, line, is_terminal):
    found, heavy = first_line(folder, *words, is_terminal=is_terminal)
    assert found.splitlines()[0] == line
    assert heavy == []


def test_a_demonstration_says_what_it_knows_and_names_others(monkeypatch, folder):
    done = run(monkeypatch, folder, "caption", "photos/a.png", "--no-thinking")
    assert "it knows drawings of coloured shapes, not photos" in done.stderr
    assert done.stderr.count("  --model ") == len(suggested(free_ram(), "photos"))
    assert done.stdout.splitlines()[-1].startswith("shapes-vl is a demonstration")
    assert "shapes-vl is a demonstration" in (folder / "captions.html").read_text()
    write_tiny("siglip2", folder / "model")
    done = run(monkeypatch, folder, "embed", "photos", "--model", "model", "--output", "v.jsonl")
    assert "demonstration" not in done.output


@pytest.mark.parametrize(
    ("gigabytes", "names"), [(1, 1), (2, 1), (6, 2), (11, 3), (20, 3), (1000, 3)]
)
def test_models_that_fit_are_named(gigabytes, names):
    found = suggested(gigabytes * 10**9, "photos")
    assert len(found) == names
    smallest = suggestions("photos")[:1]
    assert found == smallest or all(own.gigabytes <= gigabytes for own in found)


@pytest.mark.parametrize("purpose", LACKS)
def test_the_smallest_model_of_a_purpose_comes_first(purpose):
    found = suggestions(purpose)
    assert len(found) > 1
    assert list(found) == sorted(found, key=lambda own: own.gigabytes)


def test_files_are_counted_as_long_as_a_first_line_may_take(folder):
    photos = str(folder / "photos")
    assert files_so_far([photos]) == "3 files"
    assert files_so_far([f"{photos}/a.png", "https://example.org/b.png", f"{photos}/*.png"]) == (
        "1 file"
    )
    assert files_so_far([photos], seconds=0) == "1 file so far"
    assert files_so_far([photos], limit=1) == "1 of 3 files"
    assert files_so_far([photos], limit=3) == "3 files"
    assert files_so_far(["nowhere"]) == ""


def run(monkeypatch, folder, *words):
    monkeypatch.chdir(folder)
    return CliRunner().invoke(app, list(words))


@pytest.mark.parametrize(
    ("family", "message"),
    [("llama", "takes no pictures and cannot read"), ("siglip2", "gives vectors and writes no")],
)
def test_a_model_that_cannot_read_is_told_before_pages_are(monkeypatch, folder, family, message):
    write_tiny(family, folder / "model")
    done = run(monkeypatch, folder, "read", "photos/a.png", "--model", "model")
    assert done.exit_code == 2
    assert message in done.stderr
    assert not (folder / "pages.jsonl").exists()


def test_the_model_of_the_package_says_that_it_does_not_read(monkeypatch, folder):
    done = run(monkeypatch, folder, "read", "photos/a.png", "--limit", "1", "--max-tokens", "2")
    assert "coloured shapes, and reads no text; for pages, with " in done.stderr
    assert done.stderr.count("  --model ") == len(suggested(free_ram(), "pages"))


@pytest.mark.parametrize(
    ("words", "purpose"),
    [
        (("batch", "photos", "--output", "x.jsonl"), "photos"),
        (("batch", "rows.jsonl", "--output", "x.jsonl"), "photos"),
        (("caption", "photos"), "photos"),
        (("chat", "--image", "photos/a.png", "--message", "What?"), "photos"),
        (("count", "photos"), "photos"),
        (("embed", "photos"), "vectors"),
        (("embed", "photos/a.png", "photos/b.png"), "vectors"),
        (("generate", "What?", "--image", "photos/a.png"), "photos"),
        (("read", "photos"), "pages"),
        (("transcribe", "photos"), "speech"),
    ],
)
def test_every_command_asks_for_a_model_that_suits_it(monkeypatch, folder, words, purpose):
    monkeypatch.delenv("MMDEPLOY_LLM_MODEL", raising=False)
    (folder / "rows.jsonl").write_text('{"prompt": "a"}\n')
    before = sorted(folder.rglob("*"))
    done = run(monkeypatch, folder, *words)
    assert done.exit_code == 2
    assert (
        f"error: which model? shapes-vl is a demonstration: it knows drawings of coloured "
        f"shapes, {LACKS[purpose]}; for {purpose}, with " in done.stderr
    )
    for own in suggested(free_ram(), purpose):
        assert f"\n  --model {own.name} " in done.stderr
    assert ("\n--demo takes shapes-vl" in done.stderr) == (words[0] != "transcribe")
    assert done.stdout == ""
    assert sorted(folder.rglob("*")) == before


def test_no_command_asks_for_the_examples_or_where_a_model_is_named(monkeypatch, folder):
    monkeypatch.delenv("MMDEPLOY_LLM_MODEL", raising=False)
    picture = str(EXAMPLES / "images/picture-1.png")
    for words in (
        ("count", picture),
        ("count", "photos", "--demo"),
        ("count", "photos", "--model", "shapes-vl"),
        ("count", "--prompt", "a text"),
    ):
        assert run(monkeypatch, folder, *words).exit_code == 0, words
    done = run(monkeypatch, folder, "count", "photos", picture)
    assert "which model?" in done.stderr
    done = run(monkeypatch, folder, "generate", "Why?", "--max-tokens", "1")
    assert done.stderr.startswith("shapes-vl is a demonstration: it knows drawings")
    assert "photos, with" in done.stderr
    done = run(monkeypatch, folder, "generate", "Why?", "--max-tokens", "1", "--demo")
    assert "is a demonstration" not in done.stderr


def test_several_media_become_vectors_as_they_get_captions(monkeypatch, folder):
    write_tiny("siglip2", folder / "model")
    for words, count in (
        (("photos/a.png", "photos/b.png"), 2),
        (("photos/a.png",), 1),
        (("photos/b.png", "photos/more"), 2),
    ):
        done = run(
            monkeypatch, folder, "embed", *words, "--model", "model", "--output", "v.jsonl",
            "--overwrite",
        )  # fmt: skip
        assert done.exit_code == 0, done.stderr
        lines = (folder / "v.jsonl").read_text("utf-8").splitlines()
        assert len(lines) == count


@pytest.mark.full
def test_files_of_ones_own_ask_for_a_model(monkeypatch, folder):
    monkeypatch.delenv("MMDEPLOY_LLM_MODEL", raising=False)
    done = run(monkeypatch, folder, "caption", "photos/a.png", "--limit", "1")
    assert done.exit_code == 2
    assert "which model? shapes-vl is a demonstration" in done.stderr
    assert done.stderr.count("\n  --model ") == len(suggested(free_ram(), "photos"))
    assert "--demo takes shapes-vl all the same" in done.stderr
    assert not (folder / "captions.jsonl").exists()
    usual = ("caption", "photos/a.png", "--demo", "--max-tokens", "2", "--no-report")
    assert run(monkeypatch, folder, *usual).exit_code in (0, 4)
    write_tiny("siglip2", folder / "model")
    done = run(monkeypatch, folder, *usual, "--overwrite", "--model", "model")
    assert done.exit_code == 2
    assert "--demo and --model model contradict each other" in done.stderr
    monkeypatch.setenv("MMDEPLOY_LLM_MODEL", str(folder / "model"))
    assert run(monkeypatch, folder, *usual, "--overwrite").exit_code in (0, 4)
    monkeypatch.setenv("MMDEPLOY_LLM_MODEL", "shapes-vl")
    job = (
        "caption",
        "photos/b.png",
        "-o",
        "b.jsonl",
        "--save-job",
        "job.toml",
        "--max-tokens",
        "2",
    )
    run(monkeypatch, folder, *job)
    assert 'model = "shapes-vl"' in (folder / "job.toml").read_text()
