"""Markdown of pages and documents: in order, with what failed, beneath the folder."""

import pytest

from mmdeploy_llm.batch.documents.reading.folder import check_folder, write_folder
from mmdeploy_llm.data.records.record import ItemError, Record
from mmdeploy_llm.errors import ConfigError


def record(document, number=None, text="", pages=3, **fields):
    own = document if number is None else f"{document}#page={number}"
    columns = {"document": document, "page": number or 1, "pages": pages}
    return Record(id=own, path=document, text=text, columns=columns, **fields)


FAILED = {"error": ItemError(code=400, kind="MediaError", message="it is damaged")}


def test_documents_have_their_pages_in_order(tmp_path):
    records = [
        record("sub/a.pdf", 2, "two"),
        record("sub/a.pdf", 1, "one"),
        record("sub/a.pdf", 3, **FAILED),
        record("b.png", None, "a picture", pages=1),
    ]
    counts = write_folder(tmp_path / "md", records, is_marked=True)
    assert (tmp_path / "md/sub/a.pdf.md").read_text() == (
        "> **1 of 3 pages could not be read: 3**\n\n<!-- page 1 -->\n\none\n\n<!-- page 2 -->\n\n"
        "two\n\n<!-- page 3 -->\n\n> **Page 3 could not be read:** it is damaged\n"
    )
    assert (tmp_path / "md/sub/a.pdf.pages/0002.md").read_text() == "two\n"
    assert (tmp_path / "md/b.png.md").read_text() == "a picture\n"
    assert not (tmp_path / "md/b.png.pages").exists()
    assert counts.lines(tmp_path / "md") == [
        f"markdown: 4 pages of 2 documents in {tmp_path / 'md'}",
        "  sub/a.pdf: 1 of 3 pages could not be read: 3",
    ]


def test_a_summary_does_not_name_thousands_of_documents(tmp_path):
    records = [record(f"{n}.pdf", 1, pages=1, **FAILED) for n in range(30)]
    lines = write_folder(tmp_path, records, is_marked=True).lines(tmp_path)
    assert len(lines) == 22
    assert lines[-1] == "  and 10 more, each of which says so in its Markdown"


def test_a_page_that_was_cut_off_says_so(tmp_path):
    cut = record("a.pdf", 1, "wor", outcome="truncated", outcome_reason="max_tokens was reached")
    write_folder(tmp_path, [cut, record("a.pdf", 2, "b")], is_marked=True)
    text = (tmp_path / "a.pdf.md").read_text()
    assert "wor\n\n> **Page 1 is not complete:** truncated: max_tokens was reached" in text
    assert text.startswith("> **1 of 3 pages not complete: 1**")


def test_running_headers_are_comments_in_documents_and_lines_in_pages(tmp_path):
    records = [record("a.pdf", n, f"ACME\n\nx{n}\n\ny{'abc'[n - 1]}") for n in (1, 2, 3)]
    counts = write_folder(tmp_path, records, is_marked=True)
    assert counts.num_marked == 2
    assert (tmp_path / "a.pdf.md").read_text().count("<!-- page header: ACME -->") == 2
    assert (tmp_path / "a.pdf.pages/0003.md").read_text().startswith("ACME\n")
    write_folder(tmp_path, records, is_marked=False)
    assert "page header" not in (tmp_path / "a.pdf.md").read_text()


def test_no_document_leaves_the_folder(tmp_path):
    write_folder(tmp_path / "md", [record("../../x.pdf", 1, "one")], is_marked=True)
    assert (tmp_path / "md/up/up/x.pdf.md").is_file()
    (tmp_path / "md/link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="links are not followed"):
        write_folder(tmp_path / "md", [record("link/x.pdf", 1, "one")], is_marked=True)


def test_a_folder_with_files_is_not_written_into_by_a_new_run(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(ConfigError, match="has files"):
        check_folder(tmp_path, is_new=True)
    check_folder(tmp_path, is_new=False)
    with pytest.raises(ConfigError, match="no folder"):
        check_folder(tmp_path / "x", is_new=False)
