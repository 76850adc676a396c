"""PDF files as tests write them: objects with a table of their places, from the specification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def write_pdf(objects: Mapping[int, bytes], *, trailer: bytes = b"/Root 1 0 R") -> bytes:
    """Returns a file of these objects, by number, with a true table of places."""
    body, places = bytearray(b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n"), {}
    for number, content in objects.items():
        places[number] = len(body)
        body += b"%d 0 obj\n%b\nendobj\n" % (number, content)
    start, size = len(body), max(objects) + 1
    body += b"xref\n0 %d\n0000000000 65535 f \n" % size
    for number in range(1, size):
        place, kind = (places[number], b"n") if number in places else (0, b"f")
        body += b"%010d 00000 %b \n" % (place, kind)
    body += b"trailer\n<< /Size %d %b >>\nstartxref\n%d\n%%%%EOF\n" % (size, trailer, start)
    return bytes(body)


def stream(content: bytes, more: bytes = b"") -> bytes:
    """Returns a stream object."""
    return b"<< /Length %d %b >>\nstream\n%b\nendstream" % (len(content), more, content)


def simple_pdf(
    texts: Sequence[str] = ("one",),
    *,
    box: Sequence[float] = (0, 0, 200, 100),
    page: bytes = b"",
    drawing: bytes = b"1 0 0 rg 0 0 20 20 re f",
) -> bytes:
    """Returns a document with a page for each text, a red square at its lower left and the text.
    page: more entries of each page. drawing: what is drawn besides the text."""
    count = len(texts)
    kids = b" ".join(b"%d 0 R" % (4 + 2 * index) for index in range(count))
    objects = {
        1: b"<< /Type /Catalog /Pages 2 0 R >>",
        2: b"<< /Type /Pages /Kids [%b] /Count %d >>" % (kids, count),
        3: b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    }
    numbers = b" ".join(b"%g" % value for value in box)
    for index, text in enumerate(texts):
        own = 4 + 2 * index
        objects[own] = (
            b"<< /Type /Page /Parent 2 0 R /MediaBox [%b] /Contents %d 0 R "
            b"/Resources << /Font << /F1 3 0 R >> >> %b >>" % (numbers, own + 1, page)
        )
        lines = text.split("\n")
        shown = b" ".join(b"(%b) Tj 0 -14 Td" % line.encode() for line in lines)
        objects[own + 1] = stream(b"q %b Q BT /F1 12 Tf 30 60 Td 0 g %b ET" % (drawing, shown))
    return write_pdf(objects)
