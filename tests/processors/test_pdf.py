"""A PDF is split into pages that are drawn at the size that is wanted; what is broken, encrypted or
hostile is the fault of one item."""

import numpy as np
import pytest
from mmdeploy_llm_processors.pdf.splitter import PDFSplitter

from mmdeploy_llm.errors import MediaError, MediaLimitError, UnsupportedMediaError
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.media import ImageDecoder
from mmdeploy_llm.media.documents.page_ranges import parse_pages

from .pdfs import encrypted_pdf, simple_pdf, stream, write_pdf

LIMITS = MediaLimits()
RED = (255, 0, 0)


@pytest.fixture(scope="module")
def splitter():
    found = PDFSplitter(None, {})
    yield found
    found.close()


def pixels_of(part, fit=None):
    decoder = ImageDecoder()
    return np.asarray(decoder.decode(part.source, LIMITS, fit=fit).image)


def test_pages_are_drawn_at_their_dpi_or_at_the_size_that_is_wanted(splitter):
    pages = splitter.split(simple_pdf(["one", "two"]), {"dpi": 72}, LIMITS)
    assert len(pages) == 2
    assert [page.label for page in pages] == ["page 1", "page 2"]
    drawn = pixels_of(pages[0])
    assert drawn.shape == (100, 200, 3)
    assert tuple(drawn[95, 5]) == RED  # the lower left
    assert tuple(drawn[5, 5]) == (255, 255, 255)
    decoder = ImageDecoder()
    item = decoder.decode(pages[0].source, LIMITS, fit=lambda height, width: (50, 96))
    assert item.image.size == (96, 50)
    assert item.size == decoder.peek(pages[0].source, LIMITS).size == (200, 100)
    other = decoder.decode(pages[1].source, LIMITS)
    assert len({item.digest, other.digest, decoder.decode(pages[0].source, LIMITS).digest}) == 3


def test_text_layer(splitter):
    pages = splitter.split(simple_pdf(["Hello\nWorld", ""]), {"pages": "2,1"}, LIMITS)
    assert [pages.text(0), pages.text(1)] == ["", "Hello\nWorld"]


@pytest.mark.parametrize("turn", [90, 180, 270])
def test_turned_pages_are_upright(splitter, turn):
    [page] = splitter.split(simple_pdf(page=b"/Rotate %d" % turn), {"dpi": 72}, LIMITS)
    drawn = pixels_of(page)
    corner = {90: (5, 5), 180: (5, -5), 270: (-5, -5)}[turn]
    assert drawn.shape == ((100, 200, 3) if turn == 180 else (200, 100, 3))
    assert tuple(drawn[corner]) == RED


def test_only_the_crop_box_is_drawn(splitter):
    [page] = splitter.split(simple_pdf(page=b"/CropBox [0 0 10 10]"), {"dpi": 72}, LIMITS)
    assert np.unique(pixels_of(page).reshape(-1, 3), axis=0).tolist() == [list(RED)]


@pytest.mark.parametrize("box", [(-100, -50, 100, 50), (200, 100, 0, 0)])
def test_boxes_may_begin_anywhere(splitter, box):
    [page] = splitter.split(simple_pdf(box=box), {"dpi": 72}, LIMITS)
    assert pixels_of(page).shape == (100, 200, 3)


def test_a_giant_page_is_no_giant_image(splitter):
    [page] = splitter.split(simple_pdf(box=(0, 0, 14400, 14400)), {}, LIMITS)
    assert page.source.size == (4096, 4096)
    [page] = splitter.split(simple_pdf(box=(0, 0, 14400, 14400)), {"longest_side": 500}, LIMITS)
    assert page.source.size == (500, 500)
    [page] = splitter.split(simple_pdf(box=(0, 0, 14400, 14400)), {"dpi": 300}, LIMITS)
    with pytest.raises(MediaLimitError, match="3600000000 pixels"):
        pixels_of(page)
    assert pixels_of(page, fit=lambda height, width: (10, 10)).shape == (10, 10, 3)


def test_annotations_and_forms_are_drawn(splitter):
    """A square annotation with an appearance of its own, and a filled text field."""
    blue = b"<< /Type /XObject /Subtype /Form /BBox [0 0 50 50] /Length 22 >>\nstream\n"
    blue += b"0 0 1 rg 0 0 50 50 re f\nendstream"
    page = (
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 200 100] /Annots [4 0 R 6 0 R] "
        b"/Resources << >> >>"
    )
    field = (
        b"<< /Type /Annot /Subtype /Widget /FT /Tx /T (f) /V (x) /Rect [100 0 150 50] /F 4 "
        b"/AP << /N 5 0 R >> >>"
    )
    blob = write_pdf(
        {
            1: b"<< /Type /Catalog /Pages 2 0 R /AcroForm << /Fields [6 0 R] >> >>",
            2: b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
            3: page,
            4: b"<< /Type /Annot /Subtype /Square /Rect [0 0 50 50] /F 4 /AP << /N 5 0 R >> >>",
            5: blue,
            6: field,
        }
    )
    [one] = splitter.split(blob, {"dpi": 72}, LIMITS)
    drawn = pixels_of(one)
    assert tuple(drawn[75, 25]) == (0, 0, 255)  # the annotation
    assert drawn[75, 125, 2] == 255 > drawn[75, 125, 0]  # the field
    assert tuple(drawn[25, 25]) == (255, 255, 255)


def test_the_bytes_before_and_after_a_document_do_not_matter(splitter):
    assert len(splitter.split(b"junk\r\n" * 50 + simple_pdf() + b"\n\0\0", {}, LIMITS)) == 1


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (b"", "empty"),
        (b"no document", "no PDF"),
        (simple_pdf()[:60], "damaged"),
        (
            write_pdf(
                {
                    1: b"<< /Type /Catalog /Pages 2 0 R >>",
                    2: b"<< /Type /Pages /Kids [] /Count 0 >>",
                }
            ),
            "no pages",
        ),
    ],
)
def test_what_is_no_document_is_refused(splitter, blob, message):
    with pytest.raises(MediaError, match=message):
        splitter.split(blob, {}, LIMITS)


def test_a_damaged_page_leaves_the_others(splitter):
    blob = simple_pdf(["one", "two"]).replace(b"6 0 obj\n<<", b"6 0 obj\n[[")
    pages = splitter.split(blob, {"dpi": 72}, LIMITS)
    assert pixels_of(pages[0]).shape == (100, 200, 3)
    with pytest.raises(MediaError, match=r"page 2 .*damaged"):
        pixels_of(pages[1])


@pytest.mark.parametrize("kind", [b"JPXDecode", b"JBIG2Decode"])
def test_a_page_whose_picture_is_broken_is_no_blank_page(splitter, kind):
    """PDFium leaves such a picture out."""

    def scan(data, more=b""):
        more += b" /Type /XObject /Subtype /Image /Width 9 /Height 9 /BitsPerComponent 8"
        page = (
            b"<< /Parent 2 0 R /MediaBox [0 0 99 99] /Contents 4 0 R "
            b"/Resources << /XObject << /I 5 0 R >> >> >>"
        )
        return write_pdf(
            {
                1: b"<< /Pages 2 0 R >>",
                2: b"<< /Kids [3 0 R] /Count 1 >>",
                3: page,
                4: stream(b"q 99 0 0 99 0 0 cm /I Do Q"),
                5: stream(data, more + b" /ColorSpace /DeviceGray"),
            }
        )

    [page] = splitter.split(scan(b"nonsense" * 9, b"/Filter /" + kind), {}, LIMITS)
    with pytest.raises(MediaError, match="page 1 is blank: its picture"):
        pixels_of(page)
    [page] = splitter.split(scan(b"\xff" * 81), {}, LIMITS)  # a page without text, scanned
    assert pixels_of(page).min() == 255


def test_a_number_of_pages_that_is_a_lie(splitter):
    blob = simple_pdf(["one"]).replace(b"/Count 1", b"/Count 90000")
    with pytest.raises(MediaError, match="says that it has 90000 pages, of which 1 can be read"):
        splitter.split(blob, {}, LIMITS)
    assert len(splitter.split(blob, {"pages": "1"}, LIMITS)) == 1


def test_a_document_that_is_encrypted(splitter):
    """RC4 with 40 bits, as the specification's first version has it, with the password "user"."""
    blob = encrypted_pdf(b"user", "secret words")
    with pytest.raises(MediaError, match="needs a password: --password of `mmdeploy-llm read`"):
        splitter.split(blob, {}, LIMITS)
    with pytest.raises(MediaError, match="the password is a wrong one"):
        splitter.split(blob, {"password": "no"}, LIMITS)
    assert splitter.split(blob, {"password": "user"}, LIMITS).text(0) == "secret words"
    assert splitter.split(encrypted_pdf(b"", "words"), {}, LIMITS).text(0) == "words"


def test_what_is_wrong_with_the_options_is_told(splitter):
    blob = simple_pdf(["one"] * 3)
    for options, message in [
        ({"page": "1"}, r"no option 'page'; did you mean 'pages'\?"),
        ({"dpi": 0}, "from 1 to 2400"),
        ({"dpi": True}, "from 1 to 2400"),
        ({"pages": 1.5}, "must be a text"),
        ({"pages": "4"}, "page 4 of '4' does not exist; the document has 3 pages"),
        ({"pages": "a-b"}, "no range"),
    ]:
        with pytest.raises(MediaError, match=message):
            splitter.split(blob, options, LIMITS)
    assert len(splitter.split(blob, {"pages": 2}, LIMITS)) == 1
    with pytest.raises(UnsupportedMediaError, match="path"):
        splitter.split("a.pdf", {}, LIMITS)
    with pytest.raises(MediaLimitError, match="max_media_bytes"):
        splitter.split(blob, {}, MediaLimits(max_bytes=10))


@pytest.mark.parametrize(
    ("text", "pages"),
    [
        ("3", [3]),
        ("1-3", [1, 2, 3]),
        ("8-", [8, 9, 10]),
        ("-1", [10]),
        ("-3--1", [8, 9, 10]),
        ("2-1", None),
        ("1-5,8,-1", [1, 2, 3, 4, 5, 8, 10]),
        (" 9 - 10 , 1,9", [9, 10, 1]),
        ("0", None),
        ("11", None),
        ("-11", None),
        ("", None),
        ("1,,2", None),
        ("1-2-3", None),
        ("--1", None),
    ],
)
def test_page_ranges(text, pages):
    if pages is None:
        with pytest.raises(MediaError):
            parse_pages(text, 10)
    else:
        assert [index + 1 for index in parse_pages(text, 10)] == pages


@pytest.mark.parametrize("turn", [0, 90, 180, 270])
@pytest.mark.parametrize("rotate", [0, 90])
def test_pages_are_turned_as_asked(splitter, turn, rotate):
    blob = simple_pdf(page=b"/Rotate %d" % rotate)
    [plain] = splitter.split(blob, {"dpi": 72}, LIMITS)
    [page] = splitter.split(blob, {"dpi": 72, "turn": turn}, LIMITS)
    expected = np.rot90(pixels_of(plain), -turn // 90)
    found = pixels_of(page)
    assert (page.source.size, found.shape) == (expected.shape[1::-1], expected.shape)
    # Letters are drawn for their new direction, so that single pixels at their edges differ.
    assert np.abs(found.astype(int) - expected).mean() < 3
    assert (turn == 0) == (page.source.digest == plain.source.digest)
    with pytest.raises(MediaError, match="turn of a pdf must be 0, 90, 180 or 270"):
        splitter.split(blob, {"turn": 45}, LIMITS)
