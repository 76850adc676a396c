"""The command `read` from end to end: pages, Markdown, failures, resuming, presets."""

import json

import pytest
from typer.testing import CliRunner

from mmdeploy_llm.cli.program import app

PDFS = "processors/pdfs.py"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, png, load_file):
    """A folder with a document of three pages, one that is broken and a picture."""
    pdfs = load_file(PDFS)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    drawing = b"1 0 0 rg 60 20 50 50 re f"
    pages = pdfs.simple_pdf(["ACME one", "ACME two", "ACME three"], drawing=drawing)
    (tmp_path / "docs/a.pdf").write_bytes(pages)
    (tmp_path / "docs/broken.pdf").write_bytes(b"%PDF-1.7 nothing")
    (tmp_path / "docs/c.png").write_bytes(png)
    return tmp_path


def read(*words, code=0):
    done = CliRunner().invoke(app, ["read", *words])
    assert done.exit_code == code, done.output
    return done.stdout


def records(name="pages.jsonl"):
    with open(name) as file:
        return {own["id"]: own for own in map(json.loads, file)}


def test_documents_become_markdown_and_are_resumed_by_page(folder):
    words = ("docs", "--markdown", "md", "--no-thinking", "-p", "Describe the image.")
    told = read(*words, code=1)
    assert "markdown: 5 pages of 3 documents in md" in told
    assert "broken.pdf: 1 of 1 pages could not be read: 1" in told
    found = records()
    assert sorted(found) == [*(f"a.pdf#page={n}" for n in (1, 2, 3)), "broken.pdf", "c.png"]
    assert found["a.pdf#page=2"]["columns"] == {"document": "a.pdf", "page": 2, "pages": 3}
    assert found["a.pdf#page=2"]["text"] in (folder / "md/a.pdf.md").read_text()
    assert "could not be read" in (folder / "md/broken.pdf.md").read_text()
    assert (folder / "md/c.png.md").is_file()

    # One page is lost, one document is mended: these two are done again, and nothing else.
    lines = (folder / "pages.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"a.pdf#page=2"' not in line]
    (folder / "pages.jsonl").write_text("".join(kept))
    (folder / "docs/broken.pdf").write_bytes((folder / "docs/a.pdf").read_bytes())
    told = read(*words, "--resume")
    assert "4 done" in told
    assert "markdown: 7 pages of 3 documents" in told
    assert "could not be read" not in (folder / "md/broken.pdf.md").read_text()
    assert "nothing left to do" in read(*words, "--resume")
    done = CliRunner().invoke(app, ["read", *words[:-1], "Another question.", "--resume"])
    assert done.exit_code == 2
    assert "reading.prompt" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "nothing to read"),
        (("docs", "--pages", "x"), "no range"),
        (("docs/c.png", "--pages", "9"), "1 document has none of the pages 9"),
        (("docs", "--preset", "paddle"), "did you mean 'paddleocr"),
        (("docs", "--task", "table"), "the preset general has no task 'table'"),
        (("docs", "--tables", "latex"), "--tables must be one of html, markdown"),
        (("docs", "--running", "keep"), "--markdown"),
        (("docs", "--kinds", "video"), "not read page by page"),
        (("docs", "--markdown", "docs"), "has files"),
        (("gone.pdf",), "does not exist"),
    ],
)
def test_mistakes_are_told_before_the_model_is_loaded(words, message):
    done = CliRunner().invoke(app, ["read", *words])
    assert done.exit_code == 2, done.output
    assert message in done.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "preset"), [("paddleocr_vl", "paddleocr-vl"), ("glm_ocr", "glm-ocr")]
)
def test_a_model_of_an_ocr_family_is_asked_by_its_preset(family, preset, tiny_folder):
    words = ("docs/a.pdf", "--markdown", "md", "-m", str(tiny_folder(family)))
    done = CliRunner().invoke(app, ["read", *words, "--max-tokens", "8", "--image-tokens", "64"])
    assert done.exit_code in (0, 4), done.output  # random weights answer anything
    assert f"preset {preset}, task page" in done.stderr
    found = records()
    assert len(found) == 3
    for record in found.values():
        assert record["prompt"] in ("OCR:", "Text Recognition:")
        assert 0 < record["num_image_tokens"] <= 64
