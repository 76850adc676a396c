"""A page whose content or picture its file has lost is a failed page, not a blank or half one. The
files are written by hand: what is lost is known from how they were made."""

import io
import zlib

import numpy as np
import pytest
from mmdeploy_llm_processors.pdf import library, structure
from mmdeploy_llm_processors.pdf.splitter import PDFSplitter
from PIL import Image

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.media import ImageDecoder

from .pdfs import simple_pdf, stream, write_pdf

pytestmark = pytest.mark.skipif(library.raw is None, reason="pypdfium2 is not installed")
LIMITS = MediaLimits()
FOOTER = b" BT /F1 8 Tf 120 8 Td (- 2 -) Tj ET"
DRAWING = b"1 0 0 rg 60 60 136 136 re f " * 40
PACKED = zlib.compress(DRAWING)
NOISE = np.random.default_rng(5).integers(0, 256, (64, 64, 3), np.uint8)
ROWS = zlib.compress(NOISE.tobytes())
SMOOTH = zlib.compress(bytes(index * index % 251 for index in range(64 * 64 * 3)))


def encoded(form, **options):
    out = io.BytesIO()
    Image.fromarray(NOISE).save(out, form, **options)
    return out.getvalue()


JPEG, PROGRESSIVE = encoded("JPEG"), encoded("JPEG", progressive=True)


def fax():
    """Returns a picture of two colours in the fax code of group 4, as libtiff writes it."""
    out = io.BytesIO()
    Image.fromarray(NOISE[:, :, 0] > 128).save(
        out, "TIFF", compression="group4", tiffinfo={278: 64}
    )
    with Image.open(out) as image:
        (begin,), (size,) = image.tag_v2[273], image.tag_v2[279]
    return out.getvalue()[begin : begin + size]


FAX = fax()
FAX_OPTIONS = b"/ColorSpace /DeviceGray /BitsPerComponent 1 /DecodeParms << /K -1 /Columns 64 >>"


def flate(data):
    return stream(data, b"/Filter /FlateDecode")


def page_pdf(content, others=None, more=b""):
    """Returns a document of one page. content: its object 5; None: it has none. others: objects."""
    objects = {
        1: b"<< /Type /Catalog /Pages 2 0 R >>",
        2: b"<< /Type /Pages /Kids [4 0 R] /Count 1 >>",
        3: b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
        4: b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 256 256] /Contents 5 0 R "
        b"/Resources << /Font << /F1 3 0 R >> /XObject << /I 6 0 R >> >> %b >>" % more,
        5: content,
        **(others or {}),
    }
    return write_pdf({number: own for number, own in objects.items() if own is not None})


def picture(data, packed=b"/DCTDecode", more=b"/ColorSpace /DeviceRGB /BitsPerComponent 8"):
    named = b"/Type /XObject /Subtype /Image /Width 64 /Height 64 /Filter %b %b" % (packed, more)
    return stream(data, named)


def scan(own, content=b"q 256 0 0 256 0 0 cm /I Do Q" + FOOTER, **more):
    return page_pdf(stream(content), {6: own, **more})


def form(content, more=b"/XObject << /J 7 0 R >>"):
    named = b"/Type /XObject /Subtype /Form /BBox [0 0 256 256] /Resources << %b >>"
    return stream(content, named % more)


GRAY = b"/ColorSpace /DeviceGray /BitsPerComponent 1"
LOST = {
    "content cut": (
        page_pdf(flate(PACKED[: len(PACKED) // 3])),
        r"content \(object 5\) is cut off",
    ),
    "content overwritten": (
        page_pdf(flate(PACKED[: len(PACKED) // 2] + b"\xff" * 20)),
        r"object 5\) is (damaged|cut off)",
    ),
    "content zeros": (page_pdf(flate(bytes(4))), r"object 5\) is damaged"),
    "content garbage": (page_pdf(stream(b"\0\0\0garbage")), r"object 5\) is damaged"),
    "content without end": (page_pdf(b"<</Length 30>>\nstream\n\0\0\0garbage"), "object 5"),
    "content unknown": (page_pdf(stream(b"abc", b"/Filter /NoSuch")), "NoSuch, which is unknown"),
    "content missing": (page_pdf(None), r"content \(object 5\) is missing"),
    "content null": (page_pdf(b"null"), r"content \(object 5\) is missing"),
    "content hex": (page_pdf(stream(b"zz!", b"/Filter /ASCIIHexDecode")), r"object 5\) is damaged"),
    "content in another's place": (
        page_pdf(stream(DRAWING)).replace(b"5 0 obj", b"9 0 obj"),
        r"content \(object 5\) is missing",
    ),
    "picture in another's place": (
        scan(picture(JPEG)).replace(b"6 0 obj", b"9 0 obj"),
        r"/I \(object 6\) is missing",
    ),
    "one content of two": (
        page_pdf(b"[6 0 R 7 0 R]", {6: stream(DRAWING)}),
        r"content \(object 7\) is missing",
    ),
    "picture missing": (scan(None), r"/I \(object 6\) is missing"),
    "picture null": (scan(b"null"), r"/I \(object 6\) is missing"),
    "picture no stream": (scan(b"<< /Subtype /Image >>"), r"/I \(object 6\) is missing"),
    "picture not named": (
        scan(picture(JPEG), b"q 99 0 0 99 0 0 cm /K Do Q"),
        "/K is named nowhere",
    ),
    "jpeg half": (scan(picture(JPEG[: len(JPEG) // 2])), r"/I \(object 6\) is cut off"),
    "jpeg nearly whole": (scan(picture(JPEG[:-400])), r"/I \(object 6\) is cut off"),
    "jpeg progressive": (scan(picture(PROGRESSIVE[:-200])), r"/I \(object 6\) is cut off"),
    "jpeg none": (scan(picture(b"notajpeg" * 50)), r"/I \(object 6\) is damaged"),
    "jpeg none alone": (scan(picture(b"notajpeg" * 50), b"q 9 0 0 9 0 0 cm /I Do Q"), "picture"),
    "rows half": (scan(picture(ROWS[: len(ROWS) // 2], b"/FlateDecode")), r"6\) is cut off"),
    "rows overwritten": (
        scan(picture(SMOOTH[:150] + b"\xff" * 50 + SMOOTH[200:], b"/FlateDecode")),
        r"6\) is damaged|6\) is cut off",
    ),
    "rows too few": (
        scan(picture(zlib.compress(NOISE[:32].tobytes()), b"/FlateDecode")),
        "has 6144 of 12288 bytes",
    ),
    "rows too few, hex": (
        scan(picture(NOISE[:32].tobytes().hex().encode() + b">", b"/ASCIIHexDecode")),
        "has 6144 of 12288 bytes",
    ),
    "rows unknown": (scan(picture(ROWS, b"/NoSuch")), "NoSuch, which is unknown"),
    "jpeg in hex": (
        scan(picture(JPEG[:900].hex().encode() + b">", b"[/ASCIIHexDecode /DCTDecode]")),
        r"/I \(object 6\) is cut off",
    ),
    "jpeg 2000 none": (scan(picture(b"nonsense" * 9, b"/JPXDecode")), "picture"),
    "jbig2 none": (scan(picture(b"nonsense" * 9, b"/JBIG2Decode", GRAY)), "picture"),
    "fax half": (
        scan(picture(FAX[: len(FAX) // 2], b"/CCITTFaxDecode", FAX_OPTIONS)),
        r"/I \(object 6\) is cut off",
    ),
    "fax nearly whole": (
        scan(picture(FAX[:-60], b"/CCF", FAX_OPTIONS)),
        r"/I \(object 6\) is cut off",
    ),
    "in a form": (
        page_pdf(stream(b"/I Do" + FOOTER), {6: form(b"q 9 0 0 9 0 0 cm /J Do Q")}),
        r"/J \(object 7\) is missing",
    ),
    "form cut": (
        page_pdf(
            stream(b"/I Do" + FOOTER),
            {
                6: stream(
                    PACKED[: len(PACKED) // 2],
                    b"/Subtype /Form /BBox [0 0 9 9] /Filter /FlateDecode",
                )
            },
        ),
        r"drawing /I \(object 6\) is cut off",
    ),
}
WHOLE = {
    "blank": page_pdf(stream(b"")),
    "blank and packed": page_pdf(flate(b"")),
    "blank with a comment": page_pdf(stream(b"% nothing (here\n")),
    "without content": page_pdf(stream(b"")).replace(b"/Contents 5 0 R", b"/Content_ 5 0 R"),
    "null as content": page_pdf(stream(b"")).replace(b"/Contents 5 0 R", b"/Contents null "),
    "no parts": page_pdf(stream(b"")).replace(b"/Contents 5 0 R", b"/Contents [   ]"),
    "content packed": page_pdf(flate(PACKED)),
    "content without checksum": page_pdf(flate(PACKED[:-4])),
    "content with a wrong checksum": page_pdf(flate(PACKED[:-4] + b"abcd")),
    "content with a wrong length": page_pdf(
        flate(PACKED).replace(b"/Length %d" % len(PACKED), b"/Length %d" % (len(PACKED) - 9))
    ),
    "content of two": page_pdf(b"[6 0 R 7 0 R]", {6: stream(b"q 1 0"), 7: stream(b"0 rg Q")}),
    "words that look like a name": page_pdf(stream(b"BT /F1 9 Tf (see /K Do it) Tj ET")),
    "lost but not drawn": page_pdf(stream(DRAWING)),
    "jpeg": scan(picture(JPEG)),
    "bytes before the document": b"junk\r\n" * 50 + scan(picture(JPEG)),
    "without a table": scan(picture(JPEG)).replace(b"startxref", b"startxxxx"),
    "with a wrong table": scan(picture(JPEG)).replace(b"%PDF-1.7\n", b"%PDF-1.7\n%a comment\n"),
    "jpeg progressive": scan(picture(PROGRESSIVE)),
    "jpeg without its last marker": scan(picture(JPEG[:-2])),
    "jpeg with bytes after it": scan(picture(JPEG + b"\r\n\0\0")),
    "rows": scan(picture(ROWS, b"/FlateDecode")),
    "rows without checksum": scan(picture(ROWS[:-4], b"/FlateDecode")),
    "rows with more": scan(picture(zlib.compress(NOISE.tobytes() + bytes(99)), b"/FlateDecode")),
    "rows in hex": scan(picture(NOISE.tobytes().hex().encode() + b">", b"/AHx")),
    "rows with predictor": scan(
        picture(
            zlib.compress(b"".join(b"\0" + row.tobytes() for row in NOISE)),
            b"/FlateDecode",
            b"/ColorSpace /DeviceRGB /BitsPerComponent 8 /DecodeParms << /Predictor 15 /Colors 3 "
            b"/Columns 64 >>",
        )
    ),
    "mask": scan(picture(zlib.compress(bytes(8 * 64)), b"/FlateDecode", b"/ImageMask true")),
    "fax": scan(picture(FAX, b"/CCITTFaxDecode", FAX_OPTIONS)),
    "fax without its end": scan(picture(FAX[:-3], b"/CCITTFaxDecode", FAX_OPTIONS)),
    "palette": scan(
        picture(
            zlib.compress(bytes(32 * 64)),
            b"[/FlateDecode]",
            b"/ColorSpace [/Indexed /DeviceRGB 1 <000000ff0000>] /BitsPerComponent 4",
        )
    ),
    "form": page_pdf(stream(b"/I Do"), {6: form(b"q 99 0 0 99 0 0 cm /J Do Q"), 7: picture(JPEG)}),
    "form that draws itself": page_pdf(
        stream(b"/I Do"), {6: form(b"/J Do", b"/XObject << /J 6 0 R >>")}
    ),
}


@pytest.fixture(scope="module")
def splitter():
    found = PDFSplitter(None, {})
    yield found
    found.close()


def drawn(splitter, blob, place=0):
    pages = splitter.split(blob, {"dpi": 72}, LIMITS)
    return pages[place].source.draw((64, 64), LIMITS)


@pytest.mark.parametrize("name", LOST)
def test_a_page_that_has_lost_something_fails_and_names_it(splitter, name):
    blob, message = LOST[name]
    with pytest.raises(MediaError, match=f"page 1 .*{message}"):
        drawn(splitter, blob)


@pytest.mark.parametrize("name", WHOLE)
def test_a_page_that_is_whole_is_drawn(splitter, name):
    assert drawn(splitter, WHOLE[name]).shape == (64, 64, 3)


BAD_COLOURS = b"/ColorSpace [/DeviceN] /BitsPerComponent 8"  # pypdf's reader finds no names in it


def decoded(splitter, blob):
    pages = splitter.split(blob, {"dpi": 72}, LIMITS)
    return ImageDecoder().decode(pages[0].source, LIMITS)


def test_a_page_that_pypdf_cannot_read_is_drawn_with_a_note(splitter):
    blob = scan(picture(ROWS, b"/FlateDecode", BAD_COLOURS))
    (note,) = decoded(splitter, blob).notes
    assert "pypdf cannot read the page" in note
    assert decoded(splitter, WHOLE["rows"]).notes == ()


def test_a_document_that_pypdf_cannot_read_is_drawn_with_a_note(monkeypatch):
    """AES without the package cryptography is one of those."""

    def fail(*given, **more):
        raise structure.pypdf.errors.DependencyError("cryptography is required")

    monkeypatch.setattr(structure.pypdf, "PdfReader", fail)
    blob = scan(picture(JPEG), b"q 9 0 0 9 0 0 cm /I Do Q")  # another than those read before
    ((found, pixels),) = library.draw(blob, {"max_pixels": 10**6}, None, 0, (64, 64))
    assert (found["notes"], pixels.shape) == ([library.UNCHECKED], (64, 64, 3))


def test_the_answer_says_that_a_page_was_not_checked():
    blob = scan(picture(ROWS, b"/FlateDecode", BAD_COLOURS))
    with LLM("shapes-vl") as llm:
        prompt = {"prompt": "<|pdf|>", "multi_modal_data": {"pdf": blob}}
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.media_notes == (library.UNCHECKED,)


def test_pages_of_a_document_are_read_by_one_reader(monkeypatch):
    opened, own = [], structure.pypdf.PdfReader

    def counted(*given, **more):
        opened.append(given)
        return own(*given, **more)

    monkeypatch.setattr(structure.pypdf, "PdfReader", counted)
    blob = simple_pdf(["one", "two", "three"], drawing=b"0 1 0 rg 0 0 21 21 re f")
    for page in range(3):
        next(library.draw(blob, {"max_pixels": 10**6}, None, page, (20, 10)))
        assert next(library.read_text(blob, {}, None, page))[0]["text"]
    assert len(opened) == 1
    another = blob.replace(b"(one)", b"(ONE)")  # of the same length
    assert next(library.read_text(another, {}, None, 0))[0]["text"] == "ONE"
    list(library.draw(another, {"max_pixels": 10**6}, None, 0, (20, 10)))
    assert len(opened) == 2
