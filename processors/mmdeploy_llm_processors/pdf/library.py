"""PDFium: opens documents, says what they have, draws pages and reads their text. Runs in the
worker processes of isolation only; the one file that imports pypdfium2."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mmdeploy_llm.errors import MediaError, MediaLimitError, UnsupportedMediaError
from mmdeploy_llm.media.documents.page_ranges import parse_pages

from . import structure

try:
    import pypdfium2 as pdfium
    import pypdfium2.raw as raw
except ImportError:  # an extra
    pdfium = raw = None

MAX_PAGES = 100_000  # of a document: its own count may say anything
MANY = 100  # pages, of which most should be readable
MAX_TEXT = 2**20  # characters of a page's text
MAX_TURNS = 4096  # characters that say how a page is turned
WHITE = 0xFFFFFFFF
MAX_NAMED = 3  # losses in a message
UNCHECKED = (
    "pypdf cannot read the page, so that what its file has lost of it is not noticed; encrypted "
    "files may need cryptography (pip install cryptography)"
)
NOT_INSTALLED = 'PDF documents are read by pypdfium2 and pypdf (pip install "mmdeploy-llm[pdf]")'
# Pictures of which PDFium alone can say whether they can be decoded.
HARD_FILTERS = {b"JPXDecode", b"JBIG2Decode", b"CCITTFaxDecode", b"CCF"}
# What FPDF_GetLastError says after a document could not be opened.
PASSWORD, SECURITY = 4, 5


def describe(
    blob: bytes, limits: Mapping[str, Any], password: str | None, pages: str | None
) -> Iterator[tuple[dict[str, Any], np.ndarray | None]]:
    """Yields the number of pages, and of the wanted ones the indexes and the sizes in points,
    upright and cropped; (0, 0) for one that cannot be read. pages: see parse_pages; None: all.

    A document whose lists have more pages than they say, which PDFium believes, is written again:
    it is yielded too, uint8 [bytes], and opens without a password; "said" is the number that it
    said. "unread": the pages of such a document that cannot be written again.
    """
    mended, told = None, {}
    with _opened(blob, password) as document:
        count = raw.FPDF_GetPageCount(document)
        _check_count(count)
        reader = structure.open_reader(blob, password)
        real = 0 if reader is None else structure.real_count(reader)
        if real > count:
            _check_count(real)
            mended, told = structure.with_real_counts(reader), {"said": count}
        if mended is None:
            told = {"unread": real - count} if real > count else {}
            yield _described(document, count, pages) | told, None
    if mended is not None:
        with _opened(mended, None) as document:
            count = raw.FPDF_GetPageCount(document)
            yield _described(document, count, pages) | told, np.frombuffer(mended, np.uint8)


def _described(document: Any, count: int, pages: str | None) -> dict[str, Any]:
    """Returns what `describe` says of a document."""
    wanted = range(count) if pages is None else parse_pages(pages, count)
    sizes = [_size_at(document, index) for index in wanted]
    if pages is None:
        _check_readable(sizes)
    return {"num_pages": count, "indexes": list(wanted), "sizes": sizes}


def draw(
    blob: bytes,
    limits: Mapping[str, Any],
    password: str | None,
    page: int,
    size: tuple[int, int],
    turn: int = 0,
) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Yields a page on white, uint8 [height, width, 3], with its annotations and what its forms
    hold; "notes": what is told of it. page: its index. size: (width, height) in pixels, after it is
    turned by `turn` degrees clockwise."""
    width, height = size
    if width * height > limits["max_pixels"]:
        raise MediaLimitError(
            f"page {page + 1} would have {width} x {height} pixels, {limits['max_pixels']} are "
            "allowed; give a lower dpi"
        )
    with (
        _opened(blob, password) as document,
        _forms(document) as forms,
        _page(document, page) as opened,
    ):
        raw.FORM_OnAfterLoadPage(opened, forms)
        pixels = _drawn(opened, forms, width, height, turn)
        is_blank = bool(pixels.min() == 255)
        if _has_lost_picture(opened, is_blank):
            what = "blank" if is_blank else "not whole"
            raise MediaError(f"page {page + 1} is {what}: its picture cannot be decoded")
        yield {"notes": _check_whole(blob, password, page)}, pixels
        raw.FORM_OnBeforeClosePage(opened, forms)


def read_text(
    blob: bytes, limits: Mapping[str, Any], password: str | None, page: int
) -> Iterator[tuple[dict[str, Any], None]]:
    """Yields the text of a page that its file holds and a reader can see, "" for a page that is a
    picture: without that outside of the crop box and in layers that are off."""
    shown = structure.without_hidden_layers(blob, password, page)
    own = (blob, password, page) if shown is None else (shown, None, 0)
    with _opened(*own[:2]) as document, _page(document, own[2]) as opened:
        _turn_to_text(opened, page)
        with _text_of(opened, page) as text:
            yield {"text": _visible(text, _seen_box(opened))}, None


@contextmanager
def _text_of(page: Any, index: int) -> Iterator[Any]:
    """Opens the text of a page. Raises MediaError."""
    text = raw.FPDFText_LoadPage(page)
    if not text:
        raise MediaError(f"the text of page {index + 1} cannot be read; its content is damaged")
    try:
        yield text
    finally:
        raw.FPDFText_ClosePage(text)


def _turn_to_text(page: Any, index: int) -> None:
    """Turns a page so that most of its text runs from left to right: PDFium puts lines in order as
    they stand on the page, which for lines that run down or up is the wrong order."""
    quarters = [0, 0, 0, 0]
    with _text_of(page, index) as text:
        for place in range(min(MAX_TURNS, raw.FPDFText_CountChars(text))):
            if raw.FPDFText_IsGenerated(text, place) == 0:
                angle = raw.FPDFText_GetCharAngle(text, place)  # in radians, against the clock
                quarters[round(angle * 2 / math.pi) % 4] += angle >= 0
    raw.FPDFPage_SetRotation(page, max(range(4), key=quarters.__getitem__))


def _check_whole(blob: bytes, password: str | None, page: int) -> list[str]:
    """Raises MediaError for a page that draws what its document has lost: PDFium leaves it out.
    Returns a note where that is not known."""
    reader = structure.open_reader(blob, password)
    lost = None if reader is None else structure.losses(reader, page)
    if lost:
        more = f" and {len(lost) - MAX_NAMED} more" if len(lost) > MAX_NAMED else ""
        raise MediaError(f"page {page + 1} is not whole: {'; '.join(lost[:MAX_NAMED])}{more}")
    return [UNCHECKED] if lost is None else []


@contextmanager
def _opened(blob: bytes, password: str | None) -> Iterator[Any]:
    """Opens a document. Raises MediaError for one that is broken or needs another password."""
    if raw is None or not structure.is_installed():
        raise UnsupportedMediaError(NOT_INSTALLED)
    if not blob:
        raise MediaError("the pdf is empty (0 bytes)")
    # The library is set up when it is imported; the bytes must outlive the document.
    secret = None if password is None else password.encode() + b"\0"
    document = raw.FPDF_LoadMemDocument64(blob, len(blob), secret)
    if not document:
        raise _unopened(raw.FPDF_GetLastError(), password)
    try:
        yield document
    finally:
        raw.FPDF_CloseDocument(document)


def _unopened(code: int, password: str | None) -> MediaError:
    """Returns the error for a document that did not open."""
    if code == PASSWORD and password is None:
        return MediaError(
            "the pdf is encrypted and needs a password: --password of `mmdeploy-llm read`, in a "
            "prompt the option password of the document"
        )
    if code == PASSWORD:
        return MediaError("the pdf is encrypted, and the password is a wrong one")
    if code == SECURITY:
        return UnsupportedMediaError("the pdf is encrypted in a way that PDFium cannot read")
    return MediaError("the pdf is damaged, or no PDF: PDFium finds no document in it")


def _check_count(count: int) -> None:
    if count < 1:
        raise MediaError("the pdf has no pages")
    if count > MAX_PAGES:
        raise MediaLimitError(f"the pdf says that it has {count} pages, {MAX_PAGES} are allowed")


def _check_readable(sizes: Sequence[tuple[float, float]]) -> None:
    """Raises MediaError for a number of pages that is a lie: each would be an item that fails."""
    num_read = sum(size != (0.0, 0.0) for size in sizes)
    if len(sizes) > MANY and num_read < len(sizes) / 2:
        raise MediaError(
            f"the pdf says that it has {len(sizes)} pages, of which {num_read} can be read; it is "
            "damaged"
        )


def _size_at(document: Any, index: int) -> tuple[float, float]:
    """Returns the size of a page in points, (0, 0) for one that cannot be read."""
    size = raw.FS_SIZEF()
    is_read = raw.FPDF_GetPageSizeByIndexF(document, index, ctypes.byref(size))
    if is_read and not (size.width > 0 and size.height > 0):
        try:
            with _page(document, index) as page:
                return raw.FPDF_GetPageWidthF(page), raw.FPDF_GetPageHeightF(page)
        except MediaError:
            return 0.0, 0.0
    return (size.width, size.height) if is_read else (0.0, 0.0)


@contextmanager
def _page(document: Any, index: int) -> Iterator[Any]:
    page = raw.FPDF_LoadPage(document, index)
    if not page:
        raise MediaError(f"page {index + 1} of the pdf cannot be read; its object is damaged")
    try:
        _uncrop(page)
        yield page
    finally:
        raw.FPDF_ClosePage(page)


def _uncrop(page: Any) -> None:
    """Shows a page whose crop box lies outside of its media box whole, as viewers do: nothing of
    it would be left."""
    if raw.FPDF_GetPageWidthF(page) > 0 and raw.FPDF_GetPageHeightF(page) > 0:
        return
    sides = [ctypes.c_float() for _ in range(4)]
    if raw.FPDFPage_GetMediaBox(page, *map(ctypes.byref, sides)):
        raw.FPDFPage_SetCropBox(page, *(side.value for side in sides))


@contextmanager
def _forms(document: Any) -> Iterator[Any]:
    """Opens what a document's forms hold; scripts of documents are not run."""
    info = raw.FPDF_FORMFILLINFO(version=2)
    forms = raw.FPDFDOC_InitFormFillEnvironment(document, info)
    try:
        yield forms
    finally:
        if forms:
            raw.FPDFDOC_ExitFormFillEnvironment(forms)


def _drawn(page: Any, forms: Any, width: int, height: int, turn: int) -> np.ndarray:
    """Draws a page onto a bitmap of its own, whose rows may be longer than `width`."""
    bitmap = raw.FPDFBitmap_CreateEx(width, height, raw.FPDFBitmap_BGRx, None, 0)
    if not bitmap:
        raise MemoryError
    try:
        raw.FPDFBitmap_FillRect(bitmap, 0, 0, width, height, WHITE)
        at = (0, 0, width, height, turn // 90, raw.FPDF_ANNOT)
        raw.FPDF_RenderPageBitmap(bitmap, page, *at)
        if forms:
            raw.FPDF_FFLDraw(forms, bitmap, page, *at)
        stride = raw.FPDFBitmap_GetStride(bitmap)
        address = raw.FPDFBitmap_GetBuffer(bitmap)
        rows = (ctypes.c_ubyte * (stride * height)).from_address(
            ctypes.cast(address, ctypes.c_void_p).value
        )
        pixels = np.frombuffer(rows, np.uint8).reshape(height, stride)[:, : 4 * width]
        return np.ascontiguousarray(pixels.reshape(height, width, 4)[:, :, 2::-1])
    finally:
        raw.FPDFBitmap_Destroy(bitmap)


def _has_lost_picture(page: Any, is_blank: bool) -> bool:
    """Returns whether a picture on a page cannot be decoded: PDFium leaves it out. is_blank: all
    pictures are tried, not only those of which nobody else can say it."""
    for number in range(raw.FPDFPage_CountObjects(page)):
        found = raw.FPDFPage_GetObject(page, number)
        if raw.FPDFPageObj_GetType(found) == raw.FPDF_PAGEOBJ_IMAGE:
            if not is_blank and not HARD_FILTERS.intersection(_filters(found)):
                continue
            bitmap = raw.FPDFImageObj_GetBitmap(found)
            if not bitmap:
                return True
            raw.FPDFBitmap_Destroy(bitmap)
    return False


def _filters(picture: Any) -> Iterator[bytes]:
    """Yields the names of a picture's filters."""
    for number in range(raw.FPDFImageObj_GetImageFilterCount(picture)):
        name = ctypes.create_string_buffer(32)
        raw.FPDFImageObj_GetImageFilter(picture, number, name, len(name))
        yield name.value


def _seen_box(page: Any) -> tuple[float, float, float, float]:
    """Returns left, bottom, right and top of what is drawn of a page, in its own points."""
    box = raw.FS_RECTF()
    raw.FPDF_GetPageBoundingBox(page, ctypes.byref(box))
    return box.left, box.bottom, box.right, box.top


def _visible(text: Any, box: tuple[float, float, float, float]) -> str:
    """Returns the characters of a page whose middle lies in a box, with plain line ends. A hyphen
    that ends a line stays, with its line end: whether it belongs to the word nobody can know."""
    found: list[str] = []
    for place in range(min(raw.FPDFText_CountChars(text), MAX_TEXT)):
        code = raw.FPDFText_GetUnicode(text, place)
        if raw.FPDFText_IsGenerated(text, place) == 1 or _is_inside(text, place, box):
            found.append("-\n" if raw.FPDFText_IsHyphen(text, place) == 1 else _shown(code))
    joined = "".join(found).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    lines = joined.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return "\n".join(line for line in lines if line.strip())


def _is_inside(text: Any, place: int, box: tuple[float, float, float, float]) -> bool:
    left, right, bottom, top = (ctypes.c_double() for _ in range(4))
    sides = map(ctypes.byref, (left, right, bottom, top))
    if not raw.FPDFText_GetCharBox(text, place, *sides):
        return True
    x, y = (left.value + right.value) / 2, (bottom.value + top.value) / 2
    return box[0] <= x <= box[2] and box[1] <= y <= box[3]


def _shown(code: int) -> str:
    """Returns a character, "" for one that is none: a control but tabs and line ends, and what
    Unicode keeps free of characters."""
    is_control = code < 32 and code not in (9, 10, 13)
    is_none = code & 0xFFFE == 0xFFFE or 0xFDD0 <= code <= 0xFDEF or code > 0x10FFFF
    return "" if is_control or is_none else chr(code)
