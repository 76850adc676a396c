"""`caption --by-page`: pages of documents are items, and their text stands in questions."""

import json
import logging
import re
from dataclasses import replace

import pytest
from PIL import Image
from typer.testing import CliRunner

from mmdeploy_llm.batch.documents.sources import Sources
from mmdeploy_llm.batch.job import plan_batch, run_batch
from mmdeploy_llm.batch.options import option_settings
from mmdeploy_llm.batch.settings import BatchSettings
from mmdeploy_llm.cli.program import app
from mmdeploy_llm.engine.desk.outcome import Answer
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.outputs.request_output import (
    CompletionOutput,
    Completions,
    RequestMetrics,
    RequestOutput,
)
from tests.batch.conftest import Loaded

CONFIG = EngineConfig(model="shapes-vl")


class Echo(Loaded):
    """Answers with the question and the pages that it was given."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def answer_each(self, asks):
        for ask in asks:
            (given,) = ask.prompt.items
            words = f"{given.options.get('pages', 'all')}: {ask.prompt.messages[-1].text}"
            done = CompletionOutput(token_ids=[5], text=words, finish_reason="stop")
            output = RequestOutput(
                request_id="r",
                prompt=None,
                item=ask.prompt,
                outputs=Completions([done]),
                finished=True,
                metrics=RequestMetrics(arrival_time=1.0),
            )
            yield Answer(ask=ask, output=output, error=None)


@pytest.fixture
def folder(tmp_path, png, load_file, monkeypatch):
    simple_pdf = load_file("processors/pdfs.py").simple_pdf
    monkeypatch.chdir(tmp_path)
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "a.pdf").write_bytes(simple_pdf(["one", "two", "three"]))
    (docs / "c.png").write_bytes(png)
    (docs / "d.pdf").write_bytes(b"%PDF-1.4 nothing")
    pages = [Image.new("L", (8, 8), 9 * number) for number in range(2)]
    pages[0].save(docs / "scan.tiff", save_all=True, append_images=pages[1:])
    return docs


@pytest.fixture
def do(folder):
    """Returns a function that runs a batch over the folder and returns its records by id."""

    def run(mode="new", question=None, **arguments):
        settings = BatchSettings(mode=mode, question=question, **option_settings(arguments))
        with Sources(CONFIG, settings.finding.pages) as sources:
            finding = replace(settings.finding, new_source=sources.open, open_reader=lambda: None)
            job = plan_batch("docs", "out.jsonl", replace(settings, finding=finding))
            summary = run_batch(job, Echo)
        with open("out.jsonl") as file:
            return {own["id"]: own for own in map(json.loads, file)}, job, summary

    return run


PAGES = ["a.pdf#page=1", "a.pdf#page=2", "a.pdf#page=3", "scan.tiff#page=1", "scan.tiff#page=2"]


@pytest.mark.full
def test_every_page_is_an_item_with_its_text(do, folder, caplog):
    question = "{page}/{pages} {text_layer}|{sidecar}"
    for number in (1, 2, 3):
        (folder / f"a.page-{number}.txt").write_text(f"known {{page}} {number}")
    with caplog.at_level(logging.WARNING):
        found, job, summary = do(by_page=True, question=question, dedupe="bytes")
    told = "5 pages of 3 documents, 1 of which cannot be opened, and 1 other file"
    assert job.source.about == told
    assert job.source.unit == "page"
    assert sorted(found) == [*PAGES[:3], "c.png", "d.pdf", *PAGES[3:]]
    assert found["a.pdf#page=2"]["text"] == "2: 2/3 two|known {page} 2"
    assert found["a.pdf#page=2"]["columns"] == {"document": "a.pdf", "page": 2, "pages": 3}
    assert found["a.pdf#page=2"]["media"][0]["pages"] == "2"
    assert "'scan.page-1.txt' is missing" in found["scan.tiff#page=1"]["error"]["message"]
    assert found["d.pdf"]["error"]["code"] == 400
    assert summary.run.num_same == 0  # pages of one file are not equal

    lines = (folder.parent / "out.jsonl").read_text().splitlines(keepends=True)
    (folder.parent / "out.jsonl").write_text("".join(own for own in lines if "page=2" not in own))
    again, job, summary = do("resume", by_page=True, question=question)
    assert summary.num_before == 2
    assert again.keys() == found.keys()


def test_an_empty_text_is_told_once(do, caplog):
    with caplog.at_level(logging.WARNING):
        found, _, _ = do(
            by_page=True, question="Text: {text_layer}.", pages="-1", kinds="image,tiff,pdf"
        )
    assert found["a.pdf#page=3"]["text"] == "3: Text: three."
    assert found["scan.tiff#page=2"]["text"] == "2: Text: ."
    assert "c.png" in found  # a picture has no pages, and none are left out
    assert caplog.text.count("has no text of its own: {text_layer} is empty") == 1


@pytest.mark.full
def test_a_whole_document_gives_its_text_up_to_a_limit(do, folder, caplog, monkeypatch):
    found, _, _ = do(question="{text_layer}")
    assert found["a.pdf"]["text"] == "all: one\n\ntwo\n\nthree"
    assert "scan.tiff" in found
    assert "the pdf is damaged" in found["d.pdf"]["error"]["message"]
    monkeypatch.setattr("mmdeploy_llm.batch.documents.pages.MAX_TEXT", 6)
    caplog.clear()
    found, _, _ = do("overwrite", question="{text_layer}")
    assert found["a.pdf"]["text"] == "all: one\n\nt"
    assert "docs/a.pdf has more text than 6 characters" in caplog.text


def test_a_page_has_a_sidecar_of_its_own(do, folder):
    do(by_page=True, sidecar=".txt", sidecar_template="{page} of {document}: {text}")
    texts = {own.name: own.read_text() for own in folder.glob("*.txt")}
    assert texts["a.page-2.txt"] == "2 of a.pdf: 2: Describe the page.\n"
    assert texts["c.txt"] == "1 of c.png: all: Describe the image.\n"
    assert sorted(texts) == [
        *("a.page-1.txt", "a.page-2.txt", "a.page-3.txt", "c.txt"),
        *("scan.page-1.txt", "scan.page-2.txt"),
    ]


@pytest.mark.full
def test_records_of_whole_documents_are_replaced_by_pages(do):
    found, _, _ = do()
    assert "a.pdf" in found
    found, _, _ = do("resume", by_page=True)
    assert "a.pdf" not in found
    assert "a.pdf#page=3" in found


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pages": "1"}, "pages needs by_page"),
        ({"password": "x"}, "password needs by_page"),
        ({"by_page": True, "dpi": 0}, "dpi must be a number from 1 to 2400, got 0"),
        ({"by_page": True, "dpi": float("nan")}, "dpi must be a number"),
        ({"by_page": True, "pages": "0"}, "there is no page 0"),
        ({"by_page": True, "pages": "9", "kinds": "pdf"}, "1 document has none of the pages 9"),
        ({"question": "{page}"}, "pages of documents do, with --by-page"),
        ({"by_page": True, "question": "{title}"}, "no column fills {title}"),
    ],
)
def test_mistakes_are_told(do, folder, arguments, message):
    (folder / "d.pdf").unlink()
    with pytest.raises(ConfigError, match=re.escape(message)):
        do(**arguments)


def test_a_corpus_has_no_pages(folder):
    (folder / "rows.jsonl").write_text('{"prompt": "x"}\n')
    settings = BatchSettings(**option_settings({"by_page": True}))
    with pytest.raises(ConfigError, match=r"by_page .* are for folders and files"):
        plan_batch("docs/rows.jsonl", "out.jsonl", settings)


@pytest.mark.full
def test_the_commands_take_pages(folder):
    (folder / "d.pdf").unlink()
    words = ["docs", "--by-page", "--pages", "1-2"]
    done = CliRunner().invoke(app, ["count", *words])
    assert done.exit_code == 0, done.output
    assert "4 pages of 2 documents, and 1 other file" in done.stderr
    assert "a.pdf#page=2" in done.stdout
    assert "(5 pages)" in done.stdout
    done = CliRunner().invoke(app, ["caption", *words, "--no-thinking", "-p", "Describe {page}."])
    assert done.exit_code == 0, done.output
    assert "4 pages of 2 documents, and 1 other file\n" in done.stderr
    page = (folder.parent / "captions.html").read_text()
    assert "a.pdf#page=2" in page
    done = CliRunner().invoke(app, ["caption", "docs", "--pages", "1"])
    assert done.exit_code == 2
    assert "--pages needs --by-page" in done.stderr


def test_a_row_names_a_page(folder):
    """A cell with a document may name one page of it, as ids do."""
    (folder / "rows.csv").write_text("pdf,title\na.pdf#page=2,x\na.pdf,y\n")
    settings = BatchSettings(question="{title}?", **option_settings({}))
    run_batch(plan_batch("docs/rows.csv", "out.jsonl", settings), Echo)
    with open("out.jsonl") as file:
        page, whole = map(json.loads, file)
    assert (page["text"], whole["text"]) == ("2: x?", "all: y?")
    path = str(folder / "a.pdf")
    assert page["media"] == [{"kind": "pdf", "name": path, "pages": "2"}]
    assert whole["media"] == [{"kind": "pdf", "name": path}]
