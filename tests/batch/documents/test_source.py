"""Documents become pages: ids, questions with the text layer, what is chosen, and what cannot be
opened."""

from types import SimpleNamespace

import pytest
from PIL import Image

from mmdeploy_llm.batch.documents.documents import Documents
from mmdeploy_llm.batch.documents.pages import TextLayers, find_pages
from mmdeploy_llm.batch.documents.reading.plan import wanted_of
from mmdeploy_llm.batch.documents.source import PageSource
from mmdeploy_llm.data.files.chosen_kinds import ChosenKinds
from mmdeploy_llm.data.files.files import find_media
from mmdeploy_llm.data.files.options import FindingOptions
from mmdeploy_llm.data.files.page_choice import document_id
from mmdeploy_llm.data.records.ids import Selection
from mmdeploy_llm.data.records.item import Media
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.errors import ConfigError, MediaError, UnsupportedMediaError
from mmdeploy_llm.hooks import MediaLimits, PluginManager
from mmdeploy_llm.values.params import SamplingParams


@pytest.fixture(scope="module")
def documents():
    """Documents of the built-in splitters."""
    plugins = PluginManager.load(("pdf", "sources", "tiff"))
    specs = {spec.kind: spec for spec in plugins.media_processors}
    splitters = {kind: plugins.build_splitter(specs[kind], None, {}) for kind in ("pdf", "tiff")}
    with Documents(plugins, plugins.kinds, splitters, MediaLimits()) as found:
        yield found


@pytest.fixture
def folder(tmp_path, png, load_file):
    simple_pdf = load_file("processors/pdfs.py").simple_pdf
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.pdf").write_bytes(simple_pdf(["one", "two", "three"]))
    (tmp_path / "sub/b.jpg").write_bytes(simple_pdf(["only {page}"]))  # a PDF by another name
    (tmp_path / "c.png").write_bytes(png)
    (tmp_path / "d.pdf").write_bytes(b"%PDF-1.4 nothing")
    return tmp_path


@pytest.fixture
def source(documents, folder):
    """Returns a function that opens the folder."""

    def opened(prompt="Read.", pages=None, options=None, **selection):
        wanted = ChosenKinds(table=documents.table, chosen=documents.kinds)
        found = find_media([str(folder)], is_recursive=True, wanted=wanted)
        own = find_pages(found.files, documents, options or {}, pages, documents.kinds)
        return PageSource(
            found,
            SamplingParams(),
            Selection(**selection),
            pages=own,
            documents=documents,
            options=options or {},
            kinds=documents.kinds,
            more="preset x",
            question=prompt,
            system="Be exact.",
            text_of=TextLayers(lambda: documents, options or {}).of,
        )

    return opened


def test_every_page_is_an_item(source, folder):
    found = source(options={"dpi": 100})
    items = {str(item.id): item for item in found}
    pages = ["a.pdf#page=1", "a.pdf#page=2", "a.pdf#page=3"]
    assert sorted(items) == sorted([*pages, "c.png", "d.pdf", "sub/b.jpg#page=1"])
    assert "5 pages of 4 documents, 1 of which cannot be opened; preset x" in found.about
    assert (found.total, found.unit) == (6, "page")
    second = items["a.pdf#page=2"]
    assert second.columns == {"document": "a.pdf", "page": 2, "pages": 3}
    system, user = second.prompt.messages
    assert (system.role, system.content) == ("system", "Be exact.")
    path = str(folder / "a.pdf")
    assert second.media == (Media(kind="pdf", name=path, pages="2"),)
    assert user.text == "Read."
    (page,) = second.prompt.items
    assert (page.kind, page.source.uri) == ("pdf", path)
    assert page.options == {"pages": "2", "dpi": 100}
    assert [own.kind for own in items["c.png"].prompt.items] == ["image"]
    broken = items["d.pdf"]
    assert isinstance(broken, BadItem)
    assert (broken.kind, broken.path) == ("MediaError", str(folder / "d.pdf"))
    records = [SimpleNamespace(id=own, path="x") for own in items]
    assert None not in map(found.place_of, records)


def test_the_text_layer_is_a_value_of_the_question(source):
    asked = [
        item.prompt.messages[1].text
        for item in source("{page}/{pages} {width}x{height}: {text_layer}", options={"dpi": 72})
        if not isinstance(item, BadItem)
    ]
    assert "2/3 200x100: two" in asked
    assert "1/1 200x100: only {page}" in asked  # what a document says is no field
    assert "1/1 0x0: " in asked  # a picture


def test_a_page_without_words_has_no_text_part(source):
    item = next(item for item in source("") if not isinstance(item, BadItem))
    (part,) = item.prompt.messages[1].content
    assert part.item.kind == "pdf"


def test_chosen_pages_are_those_that_there_are(source):
    found = source(pages="2-,-1")
    pages = ["a.pdf#page=2", "a.pdf#page=3", "c.png", "d.pdf", "sub/b.jpg#page=1"]
    assert [str(item.id) for item in found] == pages
    assert "none of the pages 7" in source(pages="7").about
    with pytest.raises(MediaError, match="no range"):
        source(pages="x")


def test_pages_of_a_tiff_are_pages(source, folder):
    pages = [Image.new("L", (8, 8), 9 * number) for number in range(3)]
    pages[0].save(folder / "scan.tiff", save_all=True, append_images=pages[1:])
    pages[0].save(folder / "single.tif")
    found = source(options={"dpi": 100, "password": "x"})  # which a TIFF does not take
    items = {str(item.id): item for item in found}
    assert [own for own in items if own.startswith("s") and "/" not in own] == [
        *(f"scan.tiff#page={number}" for number in (1, 2, 3)),
        "single.tif",
    ]
    (given,) = items["scan.tiff#page=2"].prompt.items
    assert (given.source.uri, given.options) == (str(folder / "scan.tiff"), {"pages": "2"})
    assert items["scan.tiff#page=2"].columns["pages"] == 3
    # A record of a version that read its first page only.
    assert found.fate_of(Record(id="scan.tiff", path="x")) == "replaced"


def test_what_has_no_pages_is_told_without_an_option_that_nobody_gave(documents, folder):
    (folder / "e.mp4").write_bytes(b"\0\0\0\x14ftypisom\0\0\0\0isom")
    wanted = wanted_of(FindingOptions(), documents)
    found = find_media([str(folder)], wanted=wanted)
    assert "1 .mp4 (`read` takes image, pdf and tiff)" in found.skipped.text
    wanted = wanted_of(FindingOptions(kinds=("image",)), documents)
    assert "1 .mp4 (--kinds)" in find_media([str(folder)], wanted=wanted).skipped.text
    with pytest.raises(ConfigError, match="video is not read page by page"):
        wanted_of(FindingOptions(kinds=("video",)), documents)


def test_only_names_pages_or_documents(source, folder):
    only = frozenset({"a.pdf#page=3", str(folder / "sub/b.jpg")})
    assert [item.id for item in source(only=only)] == ["a.pdf#page=3", "sub/b.jpg#page=1"]
    with pytest.raises(ConfigError, match=r"a.pdf#page=9.*did you mean"):
        list(source(only=frozenset({"a.pdf#page=9"})))


def test_the_page_of_a_record_is_written_and_read():
    record = Record(id="x", media=(Media(kind="pdf", name="/a.pdf", pages="2"),))
    assert Record.from_json(record.to_json()) == record
    whole = Record(id="x", media=(Media(kind="image", name="/a.png"),))
    assert '"media": [{"kind": "image", "name": "/a.png"}]' in whole.to_json()
    assert Record.from_json(whole.to_json()) == whole


def test_ids_of_pages_and_documents():
    assert document_id("a.pdf#page=12") == "a.pdf"
    assert document_id("a#page=.pdf") == "a#page=.pdf"
    assert document_id("c.png") == "c.png"


def test_records_that_their_documents_have_outgrown(source):
    found = source()
    fates = {
        "a.pdf": "replaced",  # could not be opened, and now it can
        "a.pdf#page=4": "past",  # it has three pages
        "a.pdf#page=3": "kept",
        "c.png": "kept",
        "c.png#page=1": "past",  # it is a picture now
        "d.pdf": "kept",  # still cannot be opened
        "d.pdf#page=4": "kept",  # nobody knows
        "other.pdf#page=4": "kept",
    }
    for own, fate in fates.items():
        assert found.fate_of(Record(id=own, path="x")) == fate, own
    assert found.rank_of(Record(id="a.pdf#page=4", path="x")) is None
    assert found.rank_of(Record(id="a.pdf#page=3", path="x")) == (0, 3)
    # What this run does not read, it does not replace.
    only = source(only=frozenset({"c.png"}))
    assert only.fate_of(Record(id="a.pdf", path="x")) == "kept"


def test_a_library_that_is_missing_is_told_once(folder, documents):
    def count(*_):
        raise UnsupportedMediaError("PDF documents are read by pypdfium2 (pip install ...)")

    wanted = ChosenKinds(table=documents.table, chosen=documents.kinds)
    found = find_media([str(folder)], is_recursive=True, wanted=wanted)
    lacking = SimpleNamespace(
        is_paged=lambda kind: kind == "pdf", split_kinds=("pdf",), count=count
    )
    pages = find_pages(found.files, lacking, {}, None, ("pdf",))
    assert [str(file.error)[:3] for file in pages.files if file.error] == ["PDF"] * 3
    assert pages.notes == ("PDF documents are read by pypdfium2 (pip install ...)",)


def test_a_document_whose_parts_cannot_be_chosen_stays_whole(folder, documents):
    wanted = ChosenKinds(table=documents.table, chosen=documents.kinds)
    found = find_media([str(folder)], is_recursive=True, wanted=wanted)
    whole = SimpleNamespace(is_paged=lambda kind: False, split_kinds=("pdf",))
    pages = find_pages(found.files, whole, {}, None, ("pdf",))
    assert [file.index for file in pages.files] == [None] * 4
    assert pages.notes == ("3 pdf asked about whole: its plugin has no option that chooses a part",)
