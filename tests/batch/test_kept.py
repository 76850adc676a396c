"""What a person has beside a batch, or under a name that a command is given, stays as it is."""

import os

import pytest

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.records.files import OutputLostError
from mmdeploy_llm.records.record import Record
from mmdeploy_llm.report import page as report_module
from mmdeploy_llm.report.page import ReportHead, write_report
from mmdeploy_llm.saving.folders import check_output
from mmdeploy_llm.scaffold.package import write_package
from mmdeploy_llm.sinks.scan import RecordIndex

HEAD = ReportHead(model="m", created="today", version="1")


def report(page, num=0, given=None):
    index = RecordIndex()
    for number in range(num):
        index.add(Record(id=number), number, 0)
    records = [Record(id=number) for number in range(num if given is None else given)]
    write_report(page, records, HEAD, index, lambda media: [], num_shown=num)


@pytest.mark.parametrize("text", ["{}\n", "<!doctype html><p>mine", "\0", "x" * 5000])
def test_a_report_replaces_reports_only(tmp_path, text):
    page = tmp_path / "page.html"
    page.write_text(text)
    with pytest.raises(ConfigError, match="is no report of a batch, so it stays"):
        report(page)
    assert page.read_text() == text
    page.write_text("")  # as `mktemp` makes it
    report(page)
    report(page, 1)
    assert b"generator" in page.read_bytes()


def test_pictures_and_scripts_of_a_saved_page_stay(tmp_path):
    """Browsers keep the files of a page that they save in a folder of the same name."""
    names = ("pictures/ab/mine.jpg", "pictures/ab/" + 24 * "a" + "-000.jpg", "cards-mine.js")
    for name in names:
        path = tmp_path / "page_files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    ours = tmp_path / "page_files/pictures/aa" / f"{24 * 'a'}-000.jpg"
    ours.parent.mkdir()
    ours.touch()
    report(tmp_path / "page.html")
    report(tmp_path / "page.html", report_module.EMBEDDED_CARDS + 1)
    assert all((tmp_path / "page_files" / name).read_text() == "mine" for name in names)
    assert not ours.exists()


@pytest.mark.parametrize("num", [3, report_module.EMBEDDED_CARDS + 1])
def test_a_report_without_some_of_its_items_is_not_written(tmp_path, num):
    with pytest.raises(OutputLostError, match=rf"{num - 1} of {num} items were found"):
        report(tmp_path / "page.html", num, given=num - 1)
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("target", ["folder", "nowhere", "/dev/null"])
def test_links_in_place_of_a_model_or_a_package_stay(tmp_path, target):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    for name in ("model", "acme-llm"):
        (tmp_path / name).symlink_to(target)
    with pytest.raises(ConfigError, match="is a link"):
        check_output(tmp_path / "model", tmp_path / "source", overwrite=True)
    with pytest.raises(ConfigError, match="exists; nothing is overwritten"):
        write_package("acme", "parser", tmp_path)
    assert os.listdir(tmp_path / "folder") == ["config.json"]
