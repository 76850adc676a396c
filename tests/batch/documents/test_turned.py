"""Pages that lie are turned before the model sees them, in every kind of document; the record says
by how much."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from mmdeploy_llm.batch.documents.documents import Documents
from mmdeploy_llm.batch.documents.pages import find_pages
from mmdeploy_llm.batch.documents.source import PageSource
from mmdeploy_llm.cli.program import app
from mmdeploy_llm.data.files.chosen_kinds import ChosenKinds
from mmdeploy_llm.data.files.files import find_media
from mmdeploy_llm.data.records.ids import Selection
from mmdeploy_llm.hooks import MediaLimits, PluginManager
from mmdeploy_llm.media import decode_image
from mmdeploy_llm.values.params import SamplingParams

PIXELS = np.zeros((40, 60, 3), np.uint8)
PIXELS[:20, :, 0], PIXELS[:, :30, 1] = 255, 255  # four corners of four colours


class Finder:
    """Stands for the classifier: tells where the corner without red and green is."""

    def turn_of(self, image):
        array = np.asarray(image.resize((8, 8)))
        corners = [array[at][:2].max() for at in ((7, 7), (7, 0), (0, 0), (0, 7))]
        return None if min(corners) > 128 else (0, 270, 180, 90)[int(np.argmin(corners))]


@pytest.fixture(scope="module")
def documents():
    plugins = PluginManager.load(("pdf", "sources", "tiff"))
    specs = {spec.kind: spec for spec in plugins.media_processors}
    splitters = {kind: plugins.build_splitter(specs[kind], None, {}) for kind in ("pdf", "tiff")}
    with Documents(plugins, plugins.kinds, splitters, MediaLimits()) as found:
        yield found


@pytest.fixture
def folder(tmp_path, load_file):
    """Each page lies otherwise: by 0, 90, 180 and 270 degrees against the clock."""
    pdfs = load_file("processors/pdfs.py")
    lying = [Image.fromarray(np.rot90(PIXELS, quarter)) for quarter in range(4)]
    for quarter, page in enumerate(lying):
        page.copy().save(tmp_path / f"picture{quarter}.png")
        content = (
            b"q 60 0 0 40 0 0 cm /I Do Q" if quarter % 2 == 0 else b"q 40 0 0 60 0 0 cm /I Do Q"
        )
        size = b"%d %d" % page.size
        named = b"/Subtype /Image /Width %d /Height %d " % page.size
        named += b"/ColorSpace /DeviceRGB /BitsPerComponent 8"
        blob = pdfs.write_pdf(
            {
                1: b"<< /Type /Catalog /Pages 2 0 R >>",
                2: b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
                3: b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 %b] /Contents 4 0 R /Resources "
                b"<< /XObject << /I 5 0 R >> >> >>" % size,
                4: pdfs.stream(content),
                5: pdfs.stream(page.tobytes(), named),
            }
        )
        (tmp_path / f"page{quarter}.pdf").write_bytes(blob)
    lying[0].save(tmp_path / "pages.tiff", save_all=True, append_images=lying[1:])
    Image.new("RGB", (60, 40), "white").save(tmp_path / "unknown.png")
    return tmp_path


def items_of(documents, folder, finder):
    wanted = ChosenKinds(table=documents.table, chosen=documents.kinds)
    found = find_media([str(folder)], is_recursive=True, wanted=wanted)
    pages = find_pages(found.files, documents, {"dpi": 72}, None, documents.kinds)
    source = PageSource(
        found,
        SamplingParams(),
        Selection(),
        pages=pages,
        documents=documents,
        options={"dpi": 72},
        kinds=documents.kinds,
        question="Read.",
        finder=finder,
    )
    return {str(item.id): item for item in source}


def seen_of(documents, item):
    """Returns the pixels that a model gets of an item."""
    (media,) = item.prompt.items
    source = media.source
    if media.kind != "image":
        (source,) = [
            part.source
            for part in documents._splitters[media.kind].split(
                Path(media.source.uri).read_bytes(), media.options, MediaLimits()
            )
        ]
    elif not isinstance(source, bytes):
        source = Path(source.uri).read_bytes()
    return np.asarray(decode_image(source).image)


def test_every_kind_of_page_is_turned(documents, folder):
    items = items_of(documents, folder, Finder())
    assert len(items) == 13
    lying = {f"picture{n}.png": n for n in range(4)} | {f"page{n}.pdf#page=1": n for n in range(4)}
    lying |= {f"pages.tiff#page={n + 1}": n for n in range(4)}
    for own, quarter in lying.items():
        assert np.array_equal(seen_of(documents, items[own]), PIXELS), own
        columns = items[own].columns
        assert columns["turned"] == 90 * quarter
        told = f"turned by {90 * quarter} degrees clockwise to be upright"
        assert columns.get("notes") == (told if quarter else None)
    columns = items["unknown.png"].columns
    assert (columns["turned"], columns["notes"]) == (
        None,
        "it is not known whether the page is upright: it stays as it is",
    )


def test_without_the_wish_nothing_is_turned(documents, folder):
    items = items_of(documents, folder, None)
    assert "turned" not in items["picture1.png"].columns
    assert np.array_equal(seen_of(documents, items["page2.pdf#page=1"]), np.rot90(PIXELS, 2))


def test_the_record_and_the_summary_tell_it(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("mmdeploy_llm.media.documents.upright.UprightFinder", Finder)
    words = ["read", "page2.pdf", "picture0.png", "unknown.png", "--no-thinking", "-p", "Describe."]
    done = CliRunner().invoke(app, [*words, "--upright", "auto", "--max-tokens", "90"])
    assert done.exit_code in (0, 4), done.output
    with open("pages.jsonl") as file:
        found = {own["id"]: own["columns"] for own in map(json.loads, file)}
    assert [
        found[own]["turned"] for own in ("page2.pdf#page=1", "picture0.png", "unknown.png")
    ] == [
        180,
        0,
        None,
    ]
    assert "1 x turned by 180 degrees clockwise to be upright" in done.stdout
    assert "1 x it is not known whether the page is upright" in done.stdout
    done = CliRunner().invoke(app, [*words, "--resume"])
    assert done.exit_code == 2
    assert "reading.upright" in done.stderr
    done = CliRunner().invoke(app, [*words, "--upright", "yes", "--overwrite"])
    assert done.exit_code == 2
    assert "upright must be one of auto, keep" in done.stderr
