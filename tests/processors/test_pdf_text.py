"""The text layer of a PDF has what a reader sees, in the order of reading. The files are written by
hand, so their lines are known; what is drawn says whether a layer is on."""

import pytest
from mmdeploy_llm_processors.pdf import library
from mmdeploy_llm_processors.pdf.splitter import PDFSplitter

from mmdeploy_llm.hooks import MediaLimits

from .pdfs import stream, write_pdf

pytestmark = pytest.mark.skipif(library.raw is None, reason="pypdfium2 is not installed")
LIMITS = MediaLimits()
LINES = ("first line here", "second line here", "third line here")


@pytest.fixture(scope="module")
def splitter():
    found = PDFSplitter(None, {})
    yield found
    found.close()


def page_pdf(content, page=b"", *, resources=b"", catalog=b"", others=None, box=b"0 0 400 200"):
    font = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>"
    return write_pdf(
        {
            1: b"<< /Type /Catalog /Pages 2 0 R %b >>" % catalog,
            2: b"<< /Type /Pages /Kids [4 0 R] /Count 1 >>",
            3: font,
            4: b"<< /Type /Page /Parent 2 0 R /MediaBox [%b] /Contents 5 0 R /Resources "
            b"<< /Font << /F1 3 0 R >> %b >> %b >>" % (box, resources, page),
            5: stream(content),
            **(others or {}),
        }
    )


def lines_of(lines, at=(20, 170)):
    shown = b" 0 -18 Td ".join(b"(%b) Tj" % line.encode("cp1252") for line in lines)
    return b"BT /F1 12 Tf %g %g Td %b ET " % (*at, shown)


@pytest.mark.parametrize(
    "lines",
    [
        ("This is permit-", "ted by law"),
        ("a power-", "enhancing tool"),
        ("see https://a.b/foo-", "bar.html"),
        ("some-", "host.de"),
        ("Qwen-", "2 and CLIP-", "ViT"),
        ("pages 5-", "7 of it"),
        ("to -", "5 degrees"),
        ("the last line ends in a hy-",),
        ("no hyphen", "here"),
        ("in-line hyphens - of both-kinds", "stay"),
        ("a dash \u2013", "at the end \u2014", "of lines"),
        ("Stra\u00dfen-", "bahn, caf\u00e9-", "bar"),
    ],
)
def test_hyphens_and_line_ends_stay(splitter, lines):
    [*_] = pages = splitter.split(page_pdf(lines_of(lines)), {}, LIMITS)
    assert pages.text(0) == "\n".join(lines)


def test_a_soft_hyphen_that_is_drawn_is_a_hyphen(splitter):
    pages = splitter.split(page_pdf(lines_of(["permit\xad", "ted"])), {}, LIMITS)
    assert pages.text(0) == "permit-\nted"


ON_THE_PAGE = {  # what turns upright text into text that is upright on a page with /Rotate
    0: lambda x, y: (1, 0, 0, 1, x, y),
    90: lambda x, y: (0, 1, -1, 0, 400 - y, x),
    180: lambda x, y: (-1, 0, 0, -1, 400 - x, 200 - y),
    270: lambda x, y: (0, -1, 1, 0, y, 200 - x),
}


@pytest.mark.parametrize("rotate", [0, 90, 180, 270])
@pytest.mark.parametrize("text", [0, 90, 180, 270])
def test_lines_come_in_the_order_of_reading(splitter, rotate, text):
    """However a page is turned, and its text on it: the text's own direction says what follows."""
    height = 200 if text % 180 == 0 else 400
    content = b""
    for number, line in enumerate(LINES):
        place = ON_THE_PAGE[text](20, height - 40 - 20 * number)
        numbers = b" ".join(b"%g" % value for value in place)
        content += b"BT /F1 12 Tf %b Tm (%b) Tj ET\n" % (numbers, line.encode())
    pages = splitter.split(page_pdf(content, b"/Rotate %d" % rotate), {}, LIMITS)
    assert pages.text(0) == "\n".join(LINES)


def test_words_of_a_line_that_are_drawn_apart_on_a_turned_page(splitter):
    content = lines_of(["left"], (20, 100)) + lines_of(["right"], (220, 100))
    for rotate in (b"0", b"90", b"180", b"270"):
        pages = splitter.split(page_pdf(content, b"/Rotate " + rotate), {}, LIMITS)
        assert pages.text(0).split() == ["left", "right"]


@pytest.mark.parametrize(
    ("box", "seen"),
    [
        (b"/CropBox [0 100 400 200]", "inside"),
        (b"/CropBox [0 0 400 100]", "outside"),
        (b"/CropBox [0 -900 400 900]", "inside\noutside"),  # larger than the page
        (b"/CropBox [400 200 0 100]", "inside"),  # its corners in another order
        (b"/CropBox [1000 1000 1200 1100]", "inside\noutside"),  # outside of the page
        (b"/CropBox [0 0 0 0]", "inside\noutside"),
        (b"/CropBox [0 100 400 200] /Rotate 90", "inside"),
        (b"/CropBox [0 100 400 200] /Rotate 180", "inside"),
    ],
)
def test_what_is_outside_of_the_crop_box_is_not_read(splitter, box, seen):
    content = lines_of(["inside"], (20, 150)) + lines_of(["outside"], (20, 50))
    content += lines_of(["beside the page"], (500, 150)) + lines_of(["above it"], (20, 300))
    [page] = pages = splitter.split(page_pdf(content, box), {"dpi": 72}, LIMITS)
    assert pages.text(0) == seen
    num_drawn = len(seen.split("\n"))
    ink = (page.source.draw(page.source.size, LIMITS) < 128).any(axis=2).sum()
    assert ink > (130 if num_drawn == 2 else 20)
    assert ink < 130 or num_drawn == 2


@pytest.mark.parametrize(
    ("box", "size"),
    [
        (b"/CropBox [1000 1000 1200 1100]", (400, 200)),
        (b"/CropBox [-300 -300 -100 -100]", (400, 200)),
        (b"/CropBox [400 0 800 200]", (400, 200)),  # they touch
        (b"/CropBox [1000 1000 1200 1100] /Rotate 90", (200, 400)),
        (b"/CropBox [300 100 1200 1100]", (100, 100)),  # they overlap
        (b"/CropBox [0 0 0 0]", (400, 200)),
    ],
)
def test_a_crop_box_outside_of_the_media_box_is_none(splitter, box, size):
    content = lines_of(["words", "in", "it"]) + b"1 0 0 rg 0 0 400 200 re f"
    [page] = splitter.split(page_pdf(content, box), {"dpi": 72}, LIMITS)
    assert page.source.size == size
    assert page.source.draw(size, LIMITS)[-3, 3].tolist() == [255, 0, 0]


OFF = b"/OCProperties << /OCGs [6 0 R 7 0 R] /D << /OFF [7 0 R] >> >>"
ON_AND_OFF = {
    6: b"<< /Type /OCG /Name (on) >>",
    7: b"<< /Type /OCG /Name (off) >>",
}
FORM = (
    b"/Type /XObject /Subtype /Form /BBox [0 0 400 200] /Resources << /Font << /F1 3 0 R >> %b >>"
)
RULES = {
    "on": (b"6 0 R", True),
    "off": (b"7 0 R", False),
    "any on": (b"<< /Type /OCMD /OCGs [6 0 R 7 0 R] >>", True),
    "all on": (b"<< /Type /OCMD /P /AllOn /OCGs [6 0 R 7 0 R] >>", False),
    "any off": (b"<< /Type /OCMD /P /AnyOff /OCGs [6 0 R 7 0 R] >>", True),
    "all off": (b"<< /Type /OCMD /P /AllOff /OCGs [7 0 R] >>", True),
    "all off, on": (b"<< /Type /OCMD /P /AllOff /OCGs [6 0 R] >>", False),
    "one off": (b"<< /Type /OCMD /OCGs 7 0 R >>", False),
    "not": (b"<< /Type /OCMD /VE [/Not 6 0 R] >>", False),
    "and": (b"<< /Type /OCMD /VE [/And 6 0 R [/Not 7 0 R]] >>", True),
}


def check_layer(splitter, blob, is_on, more=""):
    [page] = pages = splitter.split(blob, {"dpi": 72}, LIMITS)
    drawn = page.source.draw((400, 200), LIMITS)
    red = (drawn[:, :, 0].astype(int) - drawn[:, :, 1] > 100).any()
    assert (bool(red), pages.text(0)) == (is_on, "layer" * is_on + "\n" * is_on + "always" + more)


@pytest.mark.parametrize("name", RULES)
def test_layers_that_are_off_are_not_read(splitter, name):
    rule, is_on = RULES[name]
    content = b"/OC /L BDC 1 0 0 rg " + lines_of(["layer"]) + b"EMC 0 g "
    content += lines_of(["always"], (20, 50))
    resources = b"/Properties << /L 8 0 R >>"
    others = {**ON_AND_OFF, 8: rule}
    if name in ("on", "off"):
        resources = b"/Properties << /L %b >>" % rule
        others = ON_AND_OFF
    blob = page_pdf(content, resources=resources, catalog=OFF, others=others)
    check_layer(splitter, blob, is_on)


STATES = {
    "all off but one": (b"/D << /BaseState /OFF /ON [6 0 R] >>", b"", False),
    "all off but this": (b"/D << /BaseState /OFF /ON [7 0 R] >>", b"", True),
    "no default": (b"", b"", True),
    "off for viewing": (b"/D << >>", b"/Usage << /View << /ViewState /OFF >> >>", False),
    "on for viewing": (b"/D << /OFF [7 0 R] >>", b"/Usage << /View << /ViewState /ON >> >>", True),
    "off for printing": (b"/D << >>", b"/Usage << /Print << /PrintState /OFF >> >>", True),
}


@pytest.mark.parametrize("name", STATES)
def test_states_of_layers_are_those_that_are_drawn(splitter, name):
    config, usage, is_on = STATES[name]
    content = b"/OC /L BDC 1 0 0 rg " + lines_of(["layer"]) + b"EMC 0 g "
    content += lines_of(["always"], (20, 50))
    blob = page_pdf(
        content,
        resources=b"/Properties << /L 7 0 R >>",
        catalog=b"/OCProperties << /OCGs [6 0 R 7 0 R] %b >>" % config,
        others={**ON_AND_OFF, 7: b"<< /Type /OCG /Name (off) %b >>" % usage},
    )
    check_layer(splitter, blob, is_on)


@pytest.mark.parametrize("is_on", [False, True])
def test_forms_that_are_off_and_layers_in_forms(splitter, is_on):
    layer = b"6 0 R" if is_on else b"7 0 R"
    own = b"1 0 0 rg " + lines_of(["layer"])
    content = b"q /X Do Q " + lines_of(["always"], (20, 50))
    whole = {**ON_AND_OFF, 8: stream(own, FORM % b"" + b"/OC " + layer)}
    resources = b"/XObject << /X 8 0 R >>"
    check_layer(splitter, page_pdf(content, resources=resources, catalog=OFF, others=whole), is_on)
    marked = b"/OC /L BDC " + own + b"EMC "
    inner = FORM % (b"/Properties << /L %b >>" % layer)
    part = {**ON_AND_OFF, 8: stream(b"q /X Do Q", FORM % b"/XObject << /X 9 0 R >>")}
    part[9] = stream(marked, inner)
    check_layer(splitter, page_pdf(content, resources=resources, catalog=OFF, others=part), is_on)


def test_marks_within_marks_and_lines_that_begin_by_their_operator(splitter):
    content = b"BT /F1 12 Tf 14 TL 20 150 Td /P BMC (one) Tj /OC /L BDC (no) ' /Q BMC (no) Tj EMC "
    content += b"EMC (two) ' EMC ET"
    blob = page_pdf(
        content, resources=b"/Properties << /L 7 0 R >>", catalog=OFF, others=ON_AND_OFF
    )
    assert splitter.split(blob, {}, LIMITS).text(0) == "one\ntwo"
