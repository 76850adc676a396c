"""PDF files as tests write them: objects with a table of their places, from the specification."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence

PADDING = bytes.fromhex("28bf4e5e4e758a4164004e56fffa01082e2e00b6d0683e802f0ca9fe6453697a")


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


def encrypted_pdf(password: bytes, text: str) -> bytes:
    """Returns a document of one page that is encrypted with RC4 and 40 bits (V 1, R 2)."""
    number, rights = b"0123456789abcdef", struct.pack("<i", -44)
    user = (password + PADDING)[:32]
    owner = _rc4(hashlib.md5((b"owner" + PADDING)[:32]).digest()[:5], user)
    key = hashlib.md5(user + owner + rights + number).digest()[:5]
    of_stream = hashlib.md5(key + struct.pack("<I", 5)[:3] + bytes(2)).digest()[:10]
    content = b"BT /F1 12 Tf 30 60 Td (%b) Tj ET" % text.encode()
    page = b"<< /Parent 2 0 R /MediaBox [0 0 200 100] /Contents 5 0 R /Resources 6 0 R >>"
    objects = {
        1: b"<< /Type /Catalog /Pages 2 0 R >>",
        2: b"<< /Type /Pages /Kids [4 0 R] /Count 1 >>",
        3: b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
        4: page,
        5: stream(_rc4(of_stream, content)),
        6: b"<< /Font << /F1 3 0 R >> >>",
    }
    values = tuple(value.hex().encode() for value in (number, number, owner, _rc4(key, PADDING)))
    return write_pdf(
        objects,
        trailer=b"/Root 1 0 R /ID [<%b> <%b>] "
        b"/Encrypt << /Filter /Standard /V 1 /R 2 /O <%b> /U <%b> /P -44 >>" % values,
    )


def _rc4(key: bytes, data: bytes) -> bytes:
    state, j = list(range(256)), 0
    for i in range(256):
        j = (j + state[i] + key[i % len(key)]) % 256
        state[i], state[j] = state[j], state[i]
    out, i, j = bytearray(), 0, 0
    for value in data:
        i = (i + 1) % 256
        j = (j + state[i]) % 256
        state[i], state[j] = state[j], state[i]
        out.append(value ^ state[(state[i] + state[j]) % 256])
    return bytes(out)


def listed_pdf(count: int, *, says: int, nested: bool = False, packed: bool = False) -> bytes:
    """Returns a document of `count` pages, whose list says another number. nested: pages stand in
    two lists of the list, which say wrong numbers too. packed: all but the pages' contents stand
    in an object stream, with a stream of places."""
    objects = {
        1: b"<< /Type /Catalog /Pages 2 0 R >>",
        3: b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    }
    pages = [6 + 2 * index for index in range(count)]
    parents = {page: 2 for page in pages}
    if nested:
        half = (count + 1) // 2
        for number, own in ((4, pages[:half]), (5, pages[half:])):
            kids = b" ".join(b"%d 0 R" % page for page in own)
            objects[number] = (
                b"<< /Type /Pages /Parent 2 0 R /Kids [%b] /Count 1 /MediaBox [0 0 200 100] >>"
                % kids
            )
            parents |= dict.fromkeys(own, number)
    kids = b"4 0 R 5 0 R" if nested else b" ".join(b"%d 0 R" % page for page in pages)
    objects[2] = b"<< /Type /Pages /Kids [%b] /Count %d >>" % (kids, says)
    for index, page in enumerate(pages):
        box = b"" if nested else b"/MediaBox [0 0 200 100]"
        objects[page] = (
            b"<< /Type /Page /Parent %d 0 R %b /Contents %d 0 R "
            b"/Resources << /Font << /F1 3 0 R >> >> >>" % (parents[page], box, page + 1)
        )
        shown = b"BT /F1 12 Tf 30 60 Td (page %d) Tj ET" % (index + 1)
        objects[page + 1] = stream(shown)
    return _packed_pdf(objects) if packed else write_pdf(objects)


def _packed_pdf(objects: Mapping[int, bytes]) -> bytes:
    """Returns a file whose objects, but its streams, stand in an object stream."""
    inner = {number: own for number, own in objects.items() if b"stream\n" not in own}
    outer = {number: own for number, own in objects.items() if number not in inner}
    head, body = b"", b""
    for number, own in inner.items():
        head += b"%d %d " % (number, len(body))
        body += own + b" "
    holder, table = max(objects) + 1, max(objects) + 2
    outer[holder] = stream(head + body, b"/Type /ObjStm /N %d /First %d" % (len(inner), len(head)))
    out, places = bytearray(b"%PDF-1.7\n"), {}
    for number, content in outer.items():
        places[number] = len(out)
        out += b"%d 0 obj\n%b\nendobj\n" % (number, content)
    places[table] = start = len(out)
    rows = b""
    for number in range(table + 1):
        if number in places:
            rows += struct.pack(">BIH", 1, places[number], 0)
        elif number in inner:
            rows += struct.pack(">BIH", 2, holder, list(inner).index(number))
        else:
            rows += struct.pack(">BIH", 0, 0, 65535)
    named = b"/Type /XRef /Size %d /W [1 4 2] /Root 1 0 R" % (table + 1)
    out += b"%d 0 obj\n%b\nendobj\nstartxref\n%d\n%%%%EOF\n" % (table, stream(rows, named), start)
    return bytes(out)
