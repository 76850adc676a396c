"""The report in a real browser, opened from file://; skipped when none is installed."""

import re
import shutil
import subprocess

import pytest

from mmdeploy_llm.batch.report.page import CHUNK_CARDS, ReportHead, write_report
from mmdeploy_llm.data.outputs.scan import RecordIndex
from mmdeploy_llm.data.records.record import ItemError, Record

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
NUM_RECORDS = 3 * CHUNK_CARDS + 50
HEAD = ReportHead(model="m", created="today", version="1", done="answered")

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page split into several files; every tenth item failed."""
    index, records = RecordIndex(), []
    for number in range(NUM_RECORDS):
        fault = ItemError(code=413, kind="RequestError", message="far too large")
        failed = {"error": fault}
        record = Record(id=number, text=f"word{number} & <b>", **failed if number % 10 == 9 else {})
        records.append(record)
        index.add(record, number, 0)
    path = tmp_path_factory.mktemp("report") / "a page.html"
    write_report(path, records, HEAD, index, lambda media: (), num_shown=NUM_RECORDS)
    return path


def shown(url, profile):
    """Returns what the browser shows once the page's scripts are loaded."""
    words = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    words += ["--virtual-time-budget=20000", "--dump-dom", url]
    done = subprocess.run(
        [BROWSER, *words], capture_output=True, text=True, timeout=120, check=True
    )
    count = re.search(r'id="count"[^>]*>([^<]*)<', done.stdout)[1]
    body = done.stdout.partition("<script>\ndocument")[0]
    return count, re.findall(r'<span class="name" title="([^"]*)"', body)


def test_all_files_are_loaded_and_the_first_cards_are_there(page, tmp_path):
    count, names = shown(page.as_uri(), tmp_path)
    assert count == f"{NUM_RECORDS} of {NUM_RECORDS}"
    assert names[:3] == ["0", "1", "2"]
    assert CHUNK_CARDS <= len(names) < NUM_RECORDS


def test_the_filter_finds_an_item_of_a_later_file(page, tmp_path):
    number = NUM_RECORDS - 5
    count, names = shown(f"{page.as_uri()}#word{number}%20%3Cb%3E", tmp_path)
    assert count == f"1 of {NUM_RECORDS}"
    assert names == [str(number)]


def test_failures_are_found_by_their_message(page, tmp_path):
    count, names = shown(f"{page.as_uri()}#too%20large%20413", tmp_path)
    assert count == f"{NUM_RECORDS // 10} of {NUM_RECORDS}"
    assert names[:2] == ["9", "19"]
