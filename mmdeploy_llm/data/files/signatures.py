"""The table of signatures: what a file is, by its first bytes, whatever its name says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

HEAD = 512  # bytes that identify every format
_TS_PACKET = 188
_CONTROLS = bytes(range(9)) + bytes(range(14, 32))  # that no text has
_BMP_HEADERS = (12, 16, 40, 52, 56, 64, 108, 124)  # sizes of its second header
_HEIF = ("heic", "heix", "heim", "heis", "hevc", "hevx", "mif1", "msf1", "mif2")
_AVIF = ("avif", "avis")
OTHER = "other"
_OGG_SOUND = (b"OpusHead", b"\x01vorbis", b"\x7fFLAC", b"Speex")


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format of files. kind: "image", "video", "audio", "pdf", or OTHER for what is no medium by
    itself; a kind counts where the engine or a plugin provides it.

    name: with its article. advice: what to do with a file that is not read. hint: what makes it
    readable where it is.
    """

    kind: str
    name: str
    advice: str = ""
    hint: str = ""

    @property
    def noun(self) -> str:
        """The name without its article."""
        return self.name.partition(" ")[2]


def _image(name: str) -> Format:
    return Format(kind="image", name=name)


def _video(name: str) -> Format:
    return Format(kind="video", name=name)


def _other(noun: str, advice: str = "", hint: str = "", kind: str = OTHER) -> Format:
    vowel = noun[0].lower() in "aeio" or noun.startswith(("HTML", "SVG", "XML", "xz"))
    name = f"{'an' if vowel else 'a'} {noun}"
    return Format(kind=kind, name=name, advice=advice, hint=hint)


AVIF, GIF, HEIF, PNG, TIFF, WEBP = map(_image, ("AVIF", "GIF", "HEIF", "PNG", "TIFF", "WebP"))
RAW = _other("raw photo of a camera", "convert it to JPEG or TIFF")
SOUND = _other("sound file", kind="audio")
PDF = _other("PDF document", kind="pdf")
PAGED = "tiff"  # the kind of TIFF files whose pages are read one by one
SVG = _other("SVG drawing", "convert it to PNG")
EMPTY = _other("empty file")

# At the beginning of a file; the first that fits counts.
_BEGINS: tuple[tuple[bytes, Format], ...] = (
    (b"\x89PNG\r\n\x1a\n", PNG),
    (b"\xff\xd8\xff", _image("JPEG")),
    (b"GIF87a", GIF),
    (b"GIF89a", GIF),
    (b"II*\0\x10\0\0\0CR", RAW),  # CR2 of Canon; RW2, ORF, RAF and X3F follow
    (b"IIU\0", RAW),
    (b"IIRO", RAW),
    (b"IIRS", RAW),
    (b"FUJIFILMCCD-RAW", RAW),
    (b"FOVb", RAW),
    (b"II*\0", TIFF),
    (b"MM\0*", TIFF),
    (b"II+\0", TIFF),
    (b"MM\0+", TIFF),
    (b"\x1a\x45\xdf\xa3", _video("Matroska or WebM")),
    (b"FLV\x01", _video("FLV")),
    (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", _video("ASF or WMV")),
    (b"\0\0\x01\xba", _video("MPEG")),
    (b"\0\0\0\x0cJXL \r\n\x87\n", _other("JPEG XL image", "convert it to PNG")),
    (b"\xff\x0a", _other("JPEG XL image", "convert it to PNG")),
    (b"\0\0\0\x0cjP  \r\n\x87\n", _other("JPEG 2000 image", "convert it to PNG")),
    (b"\xff\x4f\xff\x51", _other("JPEG 2000 image", "convert it to PNG")),
    (b"8BPS", _other("Photoshop file", "convert it to PNG")),
    (b"gimp xcf", _other("GIMP file", "convert it to PNG")),
    (b"\x76\x2f\x31\x01", _other("OpenEXR image", "convert it to PNG")),
    (b"\0\0\x01\0", _other("icon", "convert it to PNG")),
    (b"ID3", SOUND),
    (b"fLaC", SOUND),
    (b"MThd", _other("MIDI file")),
    (b"#!AMR", SOUND),
    (b"%PDF-", PDF),
    (b"%!PS", _other("PostScript document")),
    (b"PK\x03\x04", _other("ZIP archive", "unpack it")),
    (b"PK\x05\x06", _other("ZIP archive", "unpack it")),
    (b"Rar!\x1a\x07", _other("RAR archive", "unpack it")),
    (b"7z\xbc\xaf\x27\x1c", _other("7z archive", "unpack it")),
    (b"\x1f\x8b", _other("gzip file", "unpack it")),
    (b"BZh", _other("bzip2 file", "unpack it")),
    (b"\xfd7zXZ\0", _other("xz file", "unpack it")),
    (b"\x28\xb5\x2f\xfd", _other("zstd file", "unpack it")),
    (b"PAR1", _other("Parquet file", "name it as a corpus")),
    (b"ARROW1\0\0", _other("Arrow file", "name it as a corpus")),
    (b"SQLite format 3\0", _other("SQLite database")),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", _other("file of an old Office program or Thumbs.db")),
    (b"\x7fELF", _other("program")),
    (b"MZ\x90\0", _other("program")),
    (b"GGUF", _other("GGUF model")),
)
# At the beginning of a text, after white space and in small letters.
_TEXTS: tuple[tuple[bytes, Format], ...] = (
    (b"<!doctype html", _other("HTML page")),
    (b"<html", _other("HTML page")),
    (b"<head", _other("HTML page")),
    (b"<body", _other("HTML page")),
    (b"<svg", SVG),
    (b"<!doctype svg", SVG),
    (b"version https://git-lfs", _other("pointer of Git LFS", hint="git lfs pull fetches it")),
    (b"%pdf-", PDF),
    (b"%!ps", _other("PostScript document")),
)


def format_of(head: bytes) -> Format | None:
    """Returns the format that the first HEAD bytes of a file announce, None for an unknown one."""
    if not head:
        return EMPTY
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:64].lower()
    if text.startswith(b"<?xml"):
        return SVG if b"<svg" in head else _other("XML file")
    for begin, found in _TEXTS:
        if text.startswith(begin):
            return found
    for begin, found in _BEGINS:
        if head.startswith(begin):
            return found
    # What follows has few fixed bytes, with which a text may begin too.
    return None if is_text(head) else next(filter(None, (read(head) for read in _READERS)), None)


def is_text(head: bytes) -> bool:
    """Whether no byte of it is a control character: binary formats have zeros at once."""
    return head.translate(None, delete=_CONTROLS) == head


def _of_riff(head: bytes) -> Format | None:
    if head[:4] not in (b"RIFF", b"RF64"):
        return None
    return {b"WEBP": WEBP, b"AVI ": _video("AVI"), b"WAVE": SOUND}.get(head[8:12])


def _of_boxes(head: bytes) -> Format | None:
    """Reads the brands of a file of boxes: MP4, QuickTime, HEIF, AVIF and their kind."""
    if head[4:8] != b"ftyp":
        is_movie = head[4:8] in (b"moov", b"mdat", b"wide", b"free", b"skip")
        return _video("QuickTime") if is_movie else None
    size = min(int.from_bytes(head[:4], "big"), len(head))
    major, *others = (
        head[at : at + 4].decode("latin-1") for at in (8, *range(16, max(size - 3, 16), 4))
    )
    if major in _AVIF or (major in ("mif1", "msf1") and set(others) & set(_AVIF)):
        return AVIF
    if major in _HEIF:
        return HEIF
    if major == "crx ":
        return RAW
    return SOUND if major[:3] in ("M4A", "M4B", "M4P") else _video("MP4 or QuickTime")


def _of_bmp(head: bytes) -> Format | None:
    is_bmp = head[:2] == b"BM" and int.from_bytes(head[14:18], "little") in _BMP_HEADERS
    return _image("BMP") if is_bmp else None


def _of_ogg(head: bytes) -> Format | None:
    if not head.startswith(b"OggS"):
        return None
    return SOUND if head[28:].startswith(_OGG_SOUND) else _video("Ogg")


def _of_transport_stream(head: bytes) -> Format | None:
    """Packets of 188 bytes, in M2TS files each after a time of 4 bytes."""
    marks = head[::_TS_PACKET], head[4 :: _TS_PACKET + 4]
    is_stream = any(len(own) > 1 and own == b"\x47" * len(own) for own in marks)
    return _video("MPEG transport stream") if is_stream else None


def _of_sound(head: bytes) -> Format | None:
    is_utf16 = head.startswith(b"\xff\xfe")
    is_mpeg = head[0] == 0xFF and head[1:2] >= b"\xe2" and head[1] & 0b110 != 0 and not is_utf16
    return SOUND if is_mpeg and head[2:3] < b"\xf0" else None


_READERS: tuple[Callable[[bytes], Format | None], ...] = (
    _of_riff,
    _of_boxes,
    _of_bmp,
    _of_ogg,
    _of_transport_stream,
    _of_sound,
)
