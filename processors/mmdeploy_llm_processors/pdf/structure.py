"""Reads, by pypdf, what a PDF asks for: its lists of pages, and the objects that a page draws.
PDFium draws what it finds and says nothing of the rest. Runs in the worker processes of isolation
only; the one file that imports pypdf.
"""

from __future__ import annotations

import io
import logging
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from PIL import Image

from .layers import Hiding, Layers

try:
    import pypdf
    from pypdf import generic
except ImportError:  # an extra
    pypdf = generic = None

MAX_PAGES = 100_000  # of which a list is followed
MAX_DEPTH = 40  # of lists of pages, and of forms in forms
MAX_FORMS = 2000  # of a page that are followed
MAX_CONTENT = 2**26  # bytes of a content stream; a longer one is not followed
CHUNK = 2**20
DELIMITERS = rb"\x00\t\n\f\r ()<>\[\]{}/%"
DRAWN = re.compile(rb"/([^%b]+)[\x00\t\n\f\r ]+Do(?![^%b])" % (DELIMITERS, DELIMITERS))
NOT_OPERATORS = re.compile(rb"\((?:\\.|[^()\\])*\)|%[^\r\n]*", re.DOTALL)
OPERATOR = re.compile(
    rb"(?<![^%b])(?:BDC|BI|BMC|BT|BX|CS|DP|Do|EMC|ET|EX|G|J|K|M|MP|Q|RG|S|SC|SCN|T[*DJLTcdfjmrswz]"
    rb"|TL|W\*?|[Bbf]\*?|F|c|cm|cs|d|d0|d1|g|gs|h|i|j|k|l|m|n|q|re|rg|ri|s|sc|scn|sh|v|w|y|['\"])"
    rb"(?![^%b])" % (DELIMITERS, DELIMITERS)
)
ASCII_FILTERS = {
    "/AHx": "/ASCIIHexDecode",
    "/A85": "/ASCII85Decode",
    "/LZW": "/LZWDecode",
    "/Fl": "/FlateDecode",
    "/RL": "/RunLengthDecode",
    "/CCF": "/CCITTFaxDecode",
    "/DCT": "/DCTDecode",
}
BYTE_FILTERS = ("/ASCIIHexDecode", "/ASCII85Decode", "/LZWDecode", "/RunLengthDecode")
PICTURE_FILTERS = ("/DCTDecode", "/JPXDecode", "/CCITTFaxDecode", "/JBIG2Decode")
CHANNELS = {"/DeviceRGB": 3, "/CalRGB": 3, "/Lab": 3, "/DeviceCMYK": 4}
CHANNELS |= dict.fromkeys(("/DeviceGray", "/CalGray", "/Indexed", "/Separation"), 1)
MORE = b"\x5a" * 512  # after a picture that may lack its end
FAX_END = "000000000001" * 2
CUT, DAMAGED, MISSING = "is cut off", "is damaged", "is missing or cannot be read"


class Lost(Exception):
    """Says how a stream has lost data: "is cut off"."""


def is_installed() -> bool:
    """Returns whether pypdf is there."""
    return pypdf is not None


@dataclass(frozen=True, slots=True)
class _Document:
    """A document, by which its reader is found again. Its hash is its length: to hash all of its
    bytes would take longer than to compare them with those of the last one."""

    blob: bytes
    password: str | None

    def __hash__(self) -> int:
        return len(self.blob)


def open_reader(blob: bytes, password: str | None) -> Any:
    """Returns a document, or None for one that pypdf cannot read: nothing is known of it. The last
    one is kept, as its pages are asked for one by one; nobody may change what is read of it."""
    return _kept(_Document(blob, password))


def _read(document: _Document) -> Any:
    """Opens a document; what is damaged in it is no warning."""
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    try:
        reader = pypdf.PdfReader(io.BytesIO(document.blob), strict=False)
        if reader.is_encrypted and not reader.decrypt(document.password or ""):
            return None
        return reader if isinstance(_pages(reader), dict) else None
    except Exception:  # a parser of strangers' files: it raises anything
        return None


_kept = lru_cache(1)(_read)


def real_count(reader: Any) -> int:
    """Returns the number of pages that the lists of a document name, whatever they say of it."""
    try:
        return _count(_pages(reader), set(), 0)
    except Exception:  # see _read
        return 0


def with_real_counts(reader: Any) -> bytes | None:
    """Returns the document, written again without its password, with numbers of pages that are
    true; None where pypdf cannot."""
    try:
        writer = pypdf.PdfWriter(clone_from=reader)
        _mend(writer.root_object["/Pages"].get_object(), set(), 0)
        out = io.BytesIO()
        writer.write(out)
        return out.getvalue()
    except Exception:  # see _read
        return None


def losses(reader: Any, index: int) -> Sequence[str] | None:
    """Returns what a page draws and its document has lost, each as "its content (object 13) is
    missing"; None where pypdf cannot read the page. index: of the page, from 0."""
    try:
        page = _page_at(_pages(reader), index, 0)
        return tuple(_Page(page).losses()) if isinstance(page, dict) else None
    except Exception:  # see _read
        return None


def _pages(reader: Any) -> Any:
    return reader.root_object["/Pages"].get_object()


def _kids(node: Any) -> Any:
    """Returns the kids of a list of pages, None of a page."""
    found = node.get("/Kids") if isinstance(node, dict) else None
    found = None if found is None else found.get_object()
    return found if isinstance(found, list) else None


def _declared(node: Any) -> int:
    found = node.get("/Count", 0).get_object() if "/Count" in node else 0
    return int(found) if isinstance(found, (int, float)) else 0


def _count(node: Any, seen: set[int], depth: int) -> int:
    """Counts pages. A list whose number is that of its kids is believed if its ends are pages."""
    kids = _kids(node)
    if kids is None or depth > MAX_DEPTH or id(node) in seen:
        return int(isinstance(node, dict) and kids is None)
    seen.add(id(node))
    if kids and len(kids) == _declared(node):
        ends = kids[0].get_object(), kids[-1].get_object()
        if all(_kids(end) is None for end in ends):
            return len(kids)
    total = 0
    for kid in kids:
        total += _count(kid.get_object(), seen, depth + 1)
        if total > MAX_PAGES:
            break
    return total


def _mend(node: Any, seen: set[int], depth: int) -> int:
    kids = _kids(node)
    if kids is None or depth > MAX_DEPTH or id(node) in seen:
        return int(isinstance(node, dict) and kids is None)
    seen.add(id(node))
    total = sum(_mend(kid.get_object(), seen, depth + 1) for kid in kids)
    node[generic.NameObject("/Count")] = generic.NumberObject(total)
    return total


def _page_at(node: Any, index: int, depth: int) -> Any:
    """Returns a page as PDFium counts: a list by its own number, what is missing as a page."""
    kids = _kids(node)
    if kids is None or depth > MAX_DEPTH:
        return None
    if len(kids) == _declared(node) and index < len(kids):
        found = kids[index].get_object()
        if _kids(found) is None:
            return found
    for kid in kids:
        own = kid.get_object()
        num = 1 if _kids(own) is None else _declared(own)
        if index < num:
            return own if _kids(own) is None else _page_at(own, index, depth + 1)
        index -= num
    return None


@dataclass(frozen=True, slots=True)
class _Page:
    """A page, of which all is followed that its content draws."""

    page: Any

    def losses(self) -> Iterator[str]:
        """See the function."""
        if "/Contents" not in self.page:
            return
        contents = self.page.raw_get("/Contents")
        if isinstance(contents, generic.NullObject):
            return
        own, found = _object(contents), bytearray()
        for part in own if isinstance(own, list) else (contents,):
            try:
                found += b"\n" + _content(_object(part))
            except Lost as error:
                yield f"its content{_number(part)} {error}"
                return  # what it would draw is not known
        resources = _inherited(self.page, "/Resources")
        yield from _Drawn(set()).losses(bytes(found), resources, 0)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Follows what streams draw. seen: objects that were followed."""

    seen: set[int]

    def losses(self, content: bytes, resources: Any, depth: int) -> Iterator[str]:
        """Yields what is lost of the pictures and forms that a content stream draws."""
        objects: Any = resources.get("/XObject") if isinstance(resources, dict) else None
        objects = objects.get_object() if objects is not None else None
        objects = objects if isinstance(objects, dict) else {}
        without: bytes | None = None
        for match in dict.fromkeys(DRAWN.findall(content)):
            name = "/" + re.sub(rb"#([0-9A-Fa-f]{2})", _byte, match).decode("latin-1")
            if name not in objects:
                without = NOT_OPERATORS.sub(b"", content) if without is None else without
                if match in DRAWN.findall(without):  # no words in a text
                    yield f"what it draws as {name} is named nowhere"
                continue
            yield from self._of_object(name, objects.raw_get(name), resources, depth)

    def _of_object(self, name: str, given: Any, resources: Any, depth: int) -> Iterator[str]:
        own = _object(given)
        if not isinstance(own, generic.StreamObject):
            yield f"what it draws as {name}{_number(given)} {MISSING}"
            return
        if id(own) in self.seen or len(self.seen) > MAX_FORMS or depth > MAX_DEPTH:
            return
        self.seen.add(id(own))
        try:
            if own.get("/Subtype") == "/Image":
                what = "picture"
                _check_picture(own)
            elif own.get("/Subtype") == "/Form":
                what = "drawing"
                inner = own.get("/Resources")
                inner = resources if inner is None else inner.get_object()
                yield from self.losses(_content(own), inner, depth + 1)
        except Lost as error:
            yield f"its {what} {name}{_number(given)} {error}"


def _byte(match: re.Match[bytes]) -> bytes:
    return bytes([int(match[1], 16)])


def _object(given: Any) -> Any:
    """Returns an object, None for one that cannot be read, or in whose place stands another:
    pypdf takes that one, PDFium none."""
    try:
        return None if _is_another(given) else given.get_object()
    except Exception:  # see _read
        return None


def _is_another(given: Any) -> bool:
    """Returns whether an object with another number stands where the table says."""
    if not isinstance(given, generic.IndirectObject):
        return False
    place = given.pdf.xref.get(given.generation, {}).get(given.idnum)
    if place is None:
        return False  # in an object stream, or nowhere
    head = bytes(given.pdf.stream.getbuffer()[place : place + 40])
    match = re.match(rb"\s*(\d+)\s+\d+\s+obj", head)
    return match is not None and int(match[1]) != given.idnum


def _number(given: Any) -> str:
    return f" (object {given.idnum})" if isinstance(given, generic.IndirectObject) else ""


def _inherited(page: Any, name: str) -> Any:
    for _ in range(MAX_DEPTH):
        if not isinstance(page, dict):
            break
        if name in page:
            return page[name].get_object()
        page = page["/Parent"].get_object() if "/Parent" in page else None
    return None


def _content(stream: Any) -> bytes:
    """Returns what a content stream says. Raises Lost."""
    if not isinstance(stream, generic.StreamObject):
        raise Lost(MISSING)
    data, picture = _unpacked(stream, MAX_CONTENT)
    if picture is not None:
        raise Lost(f"is packed as {picture[1:]}, which is for pictures")
    plain = NOT_OPERATORS.sub(b"", data)
    if plain.strip(b"\0\t\n\f\r ") and OPERATOR.search(plain) is None:
        raise Lost(f"{DAMAGED}: it draws nothing")
    return data


def _filters(stream: Any) -> list[tuple[str, Any]]:
    """Returns the filters of a stream, each with its parameters."""
    names, params = stream.get("/Filter", []), stream.get("/DecodeParms", [])
    names = names.get_object() if hasattr(names, "get_object") else names
    params = params.get_object() if hasattr(params, "get_object") else params
    names = [own.get_object() for own in names] if isinstance(names, list) else [names]
    params = [own.get_object() for own in params] if isinstance(params, list) else [params]
    params += [None] * (len(names) - len(params))
    return [
        (ASCII_FILTERS.get(str(own), str(own)), param)
        for own, param in zip(names, params, strict=False)
    ]


def _unpacked(stream: Any, most: int) -> tuple[bytes, str | None]:
    """Returns the bytes of a stream, `most` at least where it has them, and the filter of a picture
    that they still have. Raises Lost."""
    data = bytes(stream._data)  # as it is stored: pypdf has no public name for it
    for name, params in _filters(stream):
        if name in PICTURE_FILTERS:
            return data, name
        if name == "/Crypt" or not data:
            continue
        if name == "/FlateDecode":
            data = _inflated(data, most)
            if isinstance(params, dict) and int(params.get("/Predictor", 1)) > 1 and most:
                data = _decoded(name, zlib.compress(data, 0), params)
        elif name in BYTE_FILTERS:
            data = _decoded(name, data, params)
        else:
            raise Lost(f"is packed as {name[1:41]}, which is unknown")
    return data, None


def _decoded(name: str, data: bytes, params: Any) -> bytes:
    """Unpacks by pypdf. Raises Lost."""
    try:
        packed = generic.EncodedStreamObject()
        packed._data = data
        packed[generic.NameObject("/Filter")] = generic.NameObject(name)
        if isinstance(params, dict):
            packed[generic.NameObject("/DecodeParms")] = params
        return bytes(packed.get_data())
    except Exception as error:  # see _read
        raise Lost(DAMAGED) from error


def _inflated(data: bytes, most: int) -> bytes:
    """Inflates until there are `most` bytes. What follows the last block is not read: its checksum
    is wrong in many files. Raises Lost."""
    if len(data) < 2 or data[0] & 15 != 8 or int.from_bytes(data[:2], "big") % 31:
        raise Lost(DAMAGED)
    inflater, found, left = zlib.decompressobj(-15), bytearray(), data[2:]
    try:
        while left and not inflater.eof and len(found) < most:
            found += inflater.decompress(left, CHUNK)
            left = inflater.unconsumed_tail
        if not inflater.eof and len(found) < most:
            found += inflater.flush()
    except zlib.error as error:
        raise Lost(DAMAGED) from error
    if not inflater.eof and len(found) < most:
        raise Lost(CUT)
    return bytes(found)


def _check_picture(stream: Any) -> None:
    """Raises Lost for a picture without all of its rows."""
    width, height = int(stream.get("/Width", 0)), int(stream.get("/Height", 0))
    bits = _bits_of_pixel(stream)
    row = (width * bits + 7) // 8
    if all(name not in PICTURE_FILTERS for name, _ in _filters(stream)):
        data = _rows(stream, max(row * height, 1))
        if row and len(data) <= row * (height - 1):
            raise Lost(f"{CUT}: it has {len(data)} of {row * height} bytes")
        return
    data, kind = _unpacked(stream, MAX_CONTENT)
    if kind == "/DCTDecode":
        _check_jpeg(data)
    elif kind == "/JPXDecode" and data.rfind(b"\xff\xd9") < data.find(b"\xff\x4f\xff\x51"):
        raise Lost(CUT)  # without its last marker
    elif kind == "/CCITTFaxDecode":
        _check_fax(data, _filters(stream)[-1][1], width, height)


def _rows(stream: Any, most: int) -> bytes:
    """Returns the rows of a picture as they are stored: predictors, which add a byte to each, are
    not undone. Raises Lost."""
    if [name for name, _ in _filters(stream)] == ["/FlateDecode"]:
        return _inflated(bytes(stream._data), most)
    return _unpacked(stream, most)[0]


def _check_jpeg(data: bytes) -> None:
    """Raises Lost for a JPEG file that does not begin, or ends before its last row. One with its
    last marker is believed. Others are decoded twice, with other bytes after them: where these
    become pixels, rows are missing."""
    if data.find(b"\xff\xd8\xff", 0, 1024) < 0:
        raise Lost(DAMAGED)
    if data.rfind(b"\xff\xd9") > data.rfind(b"\xff\xda") >= 0:
        return
    _check_end("JPEG", data + b"\xff\xd9", data + MORE + b"\xff\xd9")


def _check_fax(data: bytes, params: Any, width: int, height: int) -> None:
    """Raises Lost for a picture in the fax code of group 4 that ends before its last row. One with
    the mark of an end is believed, others are tried as JPEG files are; other fax codes are not."""
    own = params if isinstance(params, dict) else {}
    is_group_4 = int(own.get("/K", 0)) < 0 and not own.get("/EncodedByteAlign", False)
    bits = "".join(f"{byte:08b}" for byte in data.rstrip(b"\0\r\n")[-6:])
    if not is_group_4 or FAX_END in bits + "0" * 8:
        return
    size = int(own.get("/Columns", 1728)), height or int(own.get("/Rows", 0))
    _check_end("TIFF", *(_fax_file(data + more, size) for more in (b"", MORE)))


def _fax_file(data: bytes, size: tuple[int, int]) -> bytes:
    """Returns a TIFF file of one strip in the fax code of group 4."""
    width, height = size
    values = {256: width, 257: height, 258: 1, 259: 4, 262: 0, 273: 8, 278: height, 279: len(data)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in values.items())
    head = struct.pack("<2sHI", b"II", 42, 8 + len(data))
    return head + data + struct.pack("<H", len(values)) + entries + bytes(4)


def _check_end(form: str, plain: bytes, with_more: bytes) -> None:
    """Raises Lost for a picture file that is other pixels with more bytes at its end."""
    try:
        found = [_pixels(form, data) for data in (plain, with_more)]
    except Exception as error:  # codecs raise anything
        raise Lost(CUT) from error
    if found[0] != found[1]:
        raise Lost(CUT)


def _pixels(form: str, data: bytes) -> bytes:
    with Image.open(io.BytesIO(data), formats=[form]) as image:
        return image.tobytes()


def _bits_of_pixel(stream: Any) -> int:
    """Returns the bits of a picture's pixel, 0 where its colours are not known here."""
    if stream.get("/ImageMask", False):
        return 1
    space = stream.get("/ColorSpace")
    space = None if space is None else space.get_object()
    bits = int(stream.get("/BitsPerComponent", 8))
    if not isinstance(space, list) or not space:
        return bits * CHANNELS.get(str(space), 0)
    name = str(space[0])
    if name == "/ICCBased":
        return bits * int(space[1].get_object().get("/N", 0))
    if name == "/DeviceN":
        return bits * len(space[1].get_object())
    return bits * CHANNELS.get(name, 0)


def without_hidden_layers(blob: bytes, password: str | None, index: int) -> bytes | None:
    """Returns a document of one page without the texts of its layers that are off, None for one of
    a document without layers. index: of the page, from 0."""
    try:
        if "/OCProperties" not in open_reader(blob, password).root_object:
            return None
        reader = _read(_Document(blob, password))  # anew: its forms are changed below
        layers = Layers.of(reader.root_object)
        page: Any = _page_at(_pages(reader), index, 0)
        if layers is None or not isinstance(page, dict) or "/Contents" not in page:
            return None
        own = pypdf.PageObject(reader, getattr(page, "indirect_reference", None))
        own.update(page)
        for name in ("/Resources", "/MediaBox", "/CropBox", "/Rotate"):  # of its lists, too
            if name not in own and (found := _inherited(page, name)) is not None:
                own[generic.NameObject(name)] = found
        hiding = Hiding(layers, pypdf, reader, set())
        content = hiding.hidden(page["/Contents"], _inherited(page, "/Resources"), 0)
        own[generic.NameObject("/Contents")] = content
        writer, out = pypdf.PdfWriter(), io.BytesIO()
        writer.add_page(own, excluded_keys=("/Annots", "/B", "/StructParents"))
        writer.write(out)
        return out.getvalue()
    except Exception:  # see _read
        return None
