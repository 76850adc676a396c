"""The report in a real browser, opened from file://; skipped when none is installed."""

import html
import json
import re
import shutil
import subprocess

import pytest

from mmdeploy_llm.batch.report.page import CHUNK_CARDS, ReportHead, write_report
from mmdeploy_llm.data.outputs.scan import RecordIndex
from mmdeploy_llm.data.records.record import ItemError, Record, Timings

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


def dumped(url, profile):
    """Returns the page once its scripts have run."""
    words = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    words += ["--virtual-time-budget=20000", "--dump-dom", url]
    done = subprocess.run(
        [BROWSER, *words], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


def shown(url, profile):
    """Returns what the browser shows once the page's scripts are loaded."""
    page = dumped(url, profile)
    count = re.search(r'id="count"[^>]*>([^<]*)<', page)[1]
    body = page.partition("<script>\ndocument")[0]
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


DRIVER = """
<script>
const press = (node, key, more) => node.dispatchEvent(
  new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true, ...more}));
addEventListener("load", async () => {
  const out = document.createElement("pre");
  out.id = "seen";
  const first = document.querySelector(".card"), caption = first.querySelector(".caption");
  press(document.body, "j");
  const found = {focused: document.activeElement === first};
  press(first, "e");
  caption.textContent = "a corrected text";
  press(caption, "Enter", {ctrlKey: true});
  found.next = document.activeElement === first.nextElementSibling;
  press(document.activeElement, "e");
  document.activeElement.textContent = "dropped";
  press(document.activeElement, "Escape");
  found.button = document.getElementById("save").textContent;
  const make = URL.createObjectURL;
  let blob = null;
  URL.createObjectURL = own => { blob = own; return make(own); };
  document.getElementById("save").click();
  found.saved = await blob.text();
  const order = document.querySelector("select[name=order]");
  for (const each of ["most", "fewest", "slow", "outcome"]) {
    order.value = each;
    order.dispatchEvent(new Event("input", {bubbles: true}));
    found[each] = [...document.querySelectorAll(".card .name")].map(node => node.title);
  }
  out.textContent = JSON.stringify(found);
  document.body.append(out);
});
</script>
"""


def test_captions_are_edited_by_keys_and_sorted(tmp_path):
    index, records = RecordIndex(), []
    for number, (tokens, seconds) in enumerate([(5, 3.0), (9, 1.0), (2, 2.0)]):
        timings = Timings(total=seconds)
        fault = ItemError(code=413, kind="RequestError", message="no") if number == 2 else None
        record = Record(
            id=f"{number}.png", text="" if fault else f"text {number}", error=fault,
            num_output_tokens=tokens, timings=timings,
        )  # fmt: skip
        records.append(record)
        index.add(record, number, 0)
    path = tmp_path / "page.html"
    write_report(path, records, HEAD, index, lambda media: (), num_shown=3)
    path.write_text(path.read_text().replace("</body>", f"{DRIVER}</body>"))
    found = json.loads(html.unescape(seen(path.as_uri(), tmp_path / "profile")))
    assert (found["focused"], found["next"], found["button"]) == (True, True, "Save 1 edit")
    line = {"id": "0.png", "text": "a corrected text", "edited_from": "text 0"}
    assert json.loads(found["saved"]) == line
    assert found["most"] == ["1.png", "0.png", "2.png"]
    assert found["fewest"] == ["2.png", "0.png", "1.png"]
    assert found["slow"] == ["0.png", "2.png", "1.png"]
    assert found["outcome"] == ["2.png", "0.png", "1.png"]


def seen(url, profile):
    """Returns what the driver has written."""
    return re.search(r'<pre id="seen">([^<]*)<', dumped(url, profile))[1]
