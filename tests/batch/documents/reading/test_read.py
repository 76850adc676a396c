"""The command `read` from end to end: pages, Markdown, failures, resuming, presets."""

import json

import pytest
from typer.testing import CliRunner

from mmdeploy_llm import LLM
from mmdeploy_llm.cli.program import app
from mmdeploy_llm.errors import ConfigError

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


WORDS = ("docs", "--markdown", "md", "--no-thinking", "-p", "Describe the image.")


def test_documents_become_markdown_and_are_resumed_by_page(folder):
    done = CliRunner().invoke(app, ["read", *WORDS])
    assert done.exit_code == 1, done.output
    assert " 5 pages" not in done.output  # one is a document that cannot be opened
    assert "4 pages of 3 documents, 1 of which cannot be opened; your prompt\n" in done.stderr
    assert "markdown: 4 pages of 3 documents in md" in done.stdout
    assert " pages/s, " in done.stdout
    assert "  broken.pdf: The document cannot be opened: the pdf is damaged" in done.stdout
    found = records()
    assert sorted(found) == [*(f"a.pdf#page={n}" for n in (1, 2, 3)), "broken.pdf", "c.png"]
    assert found["a.pdf#page=2"]["columns"] == {"document": "a.pdf", "page": 2, "pages": 3}
    assert found["a.pdf#page=2"]["text"] in (folder / "md/a.pdf.md").read_text()
    broken = (folder / "md/broken.pdf.md").read_text()
    assert broken.startswith("> **The document cannot be opened:** the pdf is damaged")
    assert (folder / "md/c.png.md").is_file()

    # One page is lost, one document is mended: these two are done again, and nothing else.
    lines = (folder / "pages.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"a.pdf#page=2"' not in line]
    (folder / "pages.jsonl").write_text("".join(kept))
    (folder / "docs/broken.pdf").write_bytes((folder / "docs/a.pdf").read_bytes())
    told = read(*WORDS, "--resume")
    assert "4 done" in told
    assert "markdown: 7 pages of 3 documents" in told
    assert "cannot be opened" not in (folder / "md/broken.pdf.md").read_text()
    assert "broken.pdf" not in records()  # it has pages now
    assert "nothing left to do" in read(*WORDS, "--resume")
    done = CliRunner().invoke(app, ["read", *WORDS[:-1], "Another question.", "--resume"])
    assert done.exit_code == 2
    assert "reading.prompt" in done.stderr


@pytest.mark.full
def test_what_is_gone_is_told_and_pruned_with_its_markdown(folder, load_file):
    simple_pdf = load_file(PDFS).simple_pdf
    (folder / "docs/broken.pdf").unlink()
    (folder / "docs/b.pdf").write_bytes(simple_pdf(["x"]))
    read(*WORDS)
    own = folder / "md/a.pdf.pages/notes.md"
    own.write_text("of a reader")
    (folder / "docs/a.pdf").write_bytes(simple_pdf(["one", "two"]))
    (folder / "docs/b.pdf").unlink()
    told = read(*WORDS, "--resume")
    assert "2 records are of files or pages that are gone (--prune removes them)" in told
    assert "a.pdf#page=3" in records()
    text = (folder / "md/a.pdf.md").read_text()
    assert "<!-- page 2 -->" in text
    assert "<!-- page 3 -->" not in text  # the document has two pages
    assert not (folder / "md/a.pdf.pages/0003.md").exists()
    assert (folder / "md/b.pdf.md").exists()
    told = read(*WORDS, "--resume", "--prune")
    assert "removed 2 records of files or pages that were gone" in told
    assert "removed 2 files of documents and pages that are gone" in told
    assert sorted(records()) == ["a.pdf#page=1", "a.pdf#page=2", "c.png"]
    assert not (folder / "md/b.pdf.md").exists()
    assert not (folder / "md/b.pdf.pages").exists()
    assert own.exists()


@pytest.mark.full
def test_markdown_has_the_pages_of_earlier_runs(folder):
    words = ("docs/a.pdf", *WORDS[1:])
    read(*words, "--pages", "1")
    for more, num in ((("--pages", "2"), 2), (("--only", "docs/a.pdf"), 3), (("--limit", "1"), 3)):
        pages = "3 pages" if num == 3 else "2 pages"
        assert f"markdown: {pages} of 1 document in md" in read(*words, *more, "--resume")
        text = (folder / "md/a.pdf.md").read_text()
        assert all(f"<!-- page {n} -->" in text for n in range(1, num + 1))


@pytest.mark.full
def test_a_document_that_breaks_keeps_the_pages_that_were_read(folder):
    words = ("docs/a.pdf", *WORDS[1:])
    read(*words)
    (folder / "docs/a.pdf").write_bytes(b"%PDF-1.7 nothing")
    assert "1 failed" in read(*words, "--resume", code=1)
    text = (folder / "md/a.pdf.md").read_text()
    assert text.startswith("> **The document cannot be opened:** ")
    assert "<!-- page 3 -->" in text


@pytest.mark.full
def test_shards_have_whole_documents(folder):
    (folder / "docs/broken.pdf").write_bytes((folder / "docs/a.pdf").read_bytes())
    for shard in ("1/2", "2/2"):
        read(*WORDS, "--shard", shard, "-o", f"{shard[0]}.jsonl")
    for name in ("a", "broken"):
        assert "<!-- page 3 -->" in (folder / f"md/{name}.pdf.md").read_text()
    assert {own.partition("#")[0] for own in records("1.jsonl")} == {"a.pdf", "c.png"}
    assert {own.partition("#")[0] for own in records("2.jsonl")} == {"broken.pdf"}


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "nothing to read"),
        (("docs", "--pages", "x"), "no range"),
        (("docs", "--pages", "0"), "there is no page 0; pages count from 1"),
        (("docs", "--pages", "1,3-2"), "pages '3-2' end before they begin"),
        (("docs/c.png", "--pages", "9"), "1 document has none of the pages 9"),
        (("docs", "--preset", "paddle"), "did you mean 'paddleocr"),
        (("docs", "--task", "table"), "the preset general has no task 'table'"),
        (("docs", "--tables", "latex"), "--tables must be one of html, markdown"),
        (("docs", "--running", "keep"), "--markdown"),
        (("docs", "--running", "mark"), "--markdown"),
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


@pytest.mark.full
def test_an_estimate_says_what_all_pages_take(folder):
    told = read("docs", "--no-thinking", "-p", "Describe the image.", "--estimate", "2")
    assert "4 pdf pages of" in told
    assert "a.pdf#page=" in told.partition("look at:")[2]
    assert "time for all 5" in told
    assert not (folder / "pages.jsonl").exists()
    assert not list(folder.glob("*.html"))


@pytest.mark.full
def test_python_reads_as_the_command_does(folder, caplog):
    read(*WORDS, "-o", "command.jsonl", code=1)
    with LLM("shapes-vl", quiet=True, reasoning_parser="auto") as llm, caplog.at_level("INFO"):
        options = {
            "prompt": "Describe the image.",
            "chat_template_kwargs": {"enable_thinking": False},
            "use_tqdm": False,
        }
        summary = llm.read("docs", "python.jsonl", markdown="other", pages="2-", **options)
        assert (summary.num_records, summary.num_failed) == (3, 1)
        summary = llm.read(["docs"], "python.jsonl", markdown="other", resume=True, **options)
        assert (summary.num_records, summary.num_failed) == (5, 1)
        assert "markdown: 4 pages of 3 documents in other" in caplog.messages
        for wrong, message in (
            ({"page": "1"}, "read has no argument 'page'; did you mean 'pages'"),
            ({"ask": {"a": "b"}}, "read has no argument 'ask'"),
            ({"tables": "latex"}, "tables must be one of html, markdown"),
            ({"running": "keep"}, "running needs markdown"),
            ({"running": "mark"}, "running needs markdown"),
        ):
            with pytest.raises(ConfigError, match=message):
                llm.read("docs", "x.jsonl", **wrong)
    for name, own in records("command.jsonl").items():
        assert records("python.jsonl")[name]["text"] == own["text"]
    for path in (folder / "md").rglob("*.md"):
        other = folder / "other" / path.relative_to(folder / "md")
        assert path.read_text() == other.read_text()


def test_lost_content_fails_its_page_and_hidden_pages_are_read_and_told(folder, load_file):
    pdfs = load_file(PDFS)
    blob = pdfs.simple_pdf(["one", "two", "three"])
    (folder / "docs/broken.pdf").write_bytes(blob.replace(b"7 0 obj", b"9 9 obj"))
    (folder / "docs/a.pdf").write_bytes(pdfs.listed_pdf(5, says=3))
    (folder / "docs/c.png").unlink()
    done = CliRunner().invoke(app, ["read", *WORDS, "--max-tokens", "8"])
    assert "docs/a.pdf: its lists of pages count 3 and have 5, all of which are read" in done.stderr
    found = records()
    assert sorted(own for own in found if own.startswith("a.pdf")) == [
        f"a.pdf#page={n}" for n in range(1, 6)
    ]
    lost = found["broken.pdf#page=2"]
    assert lost["outcome"] == "failed"
    assert "page 2 is not whole: its content (object 7) is missing" in lost["error"]["message"]
    assert found["broken.pdf#page=3"]["outcome"] != "failed"
    assert "broken.pdf: 1 of 3 pages could not be read: 2" in done.stdout
