"""A document whose lists have more pages than they say is read to its last page."""

import pytest
from mmdeploy_llm_processors.pdf import library
from mmdeploy_llm_processors.pdf.splitter import PDFSplitter

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import MediaLimits

from .pdfs import listed_pdf

pytestmark = pytest.mark.skipif(library.raw is None, reason="pypdfium2 is not installed")
LIMITS = MediaLimits()


@pytest.fixture(scope="module")
def splitter():
    found = PDFSplitter(None, {})
    yield found
    found.close()


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("says", [1, 3, 5, 0, -2])
def test_every_page_is_read_whatever_their_number_says(splitter, says, is_nested, is_packed):
    blob = listed_pdf(5, says=says, nested=is_nested, packed=is_packed)
    pages = splitter.split(blob, {"dpi": 72}, LIMITS)
    assert [pages.text(place) for place in range(len(pages))] == [
        f"page {number}" for number in range(1, 6)
    ]
    assert [part.source.size for part in pages] == [(200, 100)] * 5
    assert all(part.source.draw((200, 100), LIMITS).min() < 100 for part in pages)
    counted = says if says > 0 else 2 * is_nested  # what the lists within say, is believed then
    told = f"its lists of pages count {counted} and have 5, all of which are read"
    assert list(pages.notes) == ([told] if counted in (1, 2, 3) else [])


def test_a_page_past_the_number_can_be_chosen(splitter):
    blob = listed_pdf(5, says=3)
    assert splitter.split(blob, {"pages": "5"}, LIMITS).text(0) == "page 5"
    assert splitter.split(blob, {"pages": "-1,4"}, LIMITS).text(0) == "page 5"
    with pytest.raises(MediaError, match="the document has 5 pages"):
        splitter.split(blob, {"pages": "6"}, LIMITS)
