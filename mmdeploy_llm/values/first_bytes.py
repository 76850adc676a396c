"""The table of first bytes: how files of each format begin, one row for each way to begin.

Images, videos and sounds, documents, tables and archives: what looks for media in folders and
columns, the decoders, and what names stored media all ask this table.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

FirstBytes = bytes | tuple[int, bytes]  # at the beginning of a file, or at an offset
HEAD = 512  # bytes of a file that first bytes may look at: they identify every format
OTHER = "other"
PNG = b"\x89PNG\r\n\x1a\n"
_CONTROLS = bytes(range(9)) + bytes(range(14, 32))  # that no text has
_BMP_HEADERS = (12, 16, 40, 52, 56, 64, 108, 124)  # sizes of its second header
_TS_PACKET = 188
_AVIF = frozenset((b"avif", b"avis"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format of files, or one of the ways in which its files begin.

    kind: "image", "video", "audio", "pdf", or OTHER for what is no medium by itself; a kind counts
        where the engine or a plugin provides it.
    name: with its article. advice: what to do with a file that is not read. hint: what makes it
        readable where it is.
    begins, outer: of each, one is there, if any is listed; `outer` at the beginning of the file.
    check: what else must hold. texts: one of which begins it, after white space and in any case.
    image: Pillow's name of the format. container: FFmpeg's name of it.
    suffixes: names of files may keep these; the first is for those that have none.
    """

    kind: str
    name: str
    advice: str = ""
    hint: str = ""
    begins: tuple[FirstBytes, ...] = ()
    outer: tuple[bytes, ...] = ()
    check: Callable[[bytes], bool] | None = None
    texts: tuple[bytes, ...] = ()
    image: str = ""
    container: str = ""
    suffixes: tuple[str, ...] = ()

    @property
    def noun(self) -> str:
        """The name without its article."""
        return self.name.partition(" ")[2]

    @property
    def is_certain(self) -> bool:
        """Whether no text begins so: it is neither short nor at an offset."""
        return (
            not self.outer and not self.check and all(isinstance(it, bytes) for it in self.begins)
        )

    def fits(self, head: bytes) -> bool:
        """Returns whether a file begins so."""
        if not (self.begins or self.outer or self.check):
            return False
        return (
            (not self.outer or head.startswith(self.outer))
            and (not self.begins or any(_is_at(head, begin) for begin in self.begins))
            and (self.check is None or self.check(head))
        )


def format_of(head: bytes) -> Format | None:
    """Returns the format that the first HEAD bytes of a file announce, None for an unknown one."""
    if not head:
        return EMPTY
    text = head.removeprefix(codecs.BOM_UTF8).lstrip()[:64].lower()
    if text.startswith(b"<?xml"):
        return SVG if b"<svg" in head else XML
    if text.startswith(_TEXTS):
        return next(row for row in FORMATS if text.startswith(row.texts))
    places = set(_UNINDEXED)
    for offset in _OFFSETS:
        places.update(_INDEX.get((offset, head[offset : offset + 2]), ()))
    for place in sorted(places):
        row = FORMATS[place]
        if row.fits(head) and (row.is_certain or not is_text(head)):
            return row
    return None


def is_text(head: bytes) -> bool:
    """Whether no character of it is a control character: binary formats have zeros at once."""
    if head.startswith(codecs.BOM_UTF16_LE):  # with which a frame of MPEG audio may begin, too
        try:
            head = codecs.getincrementaldecoder("utf-16")().decode(head).encode()
        except UnicodeError:
            return False
    return head.translate(None, delete=_CONTROLS) == head


def _is_at(head: bytes, begin: FirstBytes) -> bool:
    offset, own = begin if isinstance(begin, tuple) else (0, begin)
    return head.startswith(own, offset)


def _is_mpeg_audio(head: bytes) -> bool:
    """Returns whether a frame of MPEG audio, layer 1 to 3, begins here."""
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return False
    layer, version = head[1] >> 1 & 3, head[1] >> 3 & 3
    return layer != 0 and version != 1 and head[2] >> 4 != 15 and head[2] >> 2 & 3 != 3


def _is_adts(head: bytes) -> bool:
    """Returns whether a frame of AAC begins here."""
    return len(head) > 2 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0 and head[2] >> 2 & 15 < 13


def _is_ac3(head: bytes) -> bool:
    """Returns whether a frame of AC-3 begins here: rate, size and version are those that there are
    (ETSI TS 102 366, 5.3)."""
    return len(head) > 5 and head[4] >> 6 != 3 and head[4] & 63 < 38 and head[5] >> 3 <= 10


def _is_eac3(head: bytes) -> bool:
    """Returns whether a frame of Enhanced AC-3 begins here (the same, annex E)."""
    return len(head) > 5 and 10 < head[5] >> 3 <= 16 and head[2] >> 6 != 3


def _is_bmp(head: bytes) -> bool:
    """Returns whether the second header has a size that one has, or is cut off."""
    return len(head) < 18 or int.from_bytes(head[14:18], "little") in _BMP_HEADERS


def _names_avif(head: bytes) -> bool:
    """Returns whether AVIF is among the brands of a file of boxes."""
    size = min(int.from_bytes(head[:4], "big"), len(head))
    return not _AVIF.isdisjoint(head[at : at + 4] for at in range(16, size - 3, 4))


def _are_packets(head: bytes) -> bool:
    marks = head[::_TS_PACKET]
    return len(marks) > 1 and marks == b"\x47" * len(marks)


def _are_timed_packets(head: bytes) -> bool:
    """Returns whether each packet comes after a time of 4 bytes."""
    marks = head[4 :: _TS_PACKET + 4]
    return len(marks) > 1 and marks == b"\x47" * len(marks)


def _boxes(*brands: str) -> tuple[FirstBytes, ...]:
    return tuple((4, b"ftyp" + brand.encode()) for brand in brands)


def _image(name: str, *begins: FirstBytes, suffixes: str, **rest: Any) -> Format:
    return Format(
        **{"kind": "image", "name": name, "image": name.upper()} | rest,
        begins=begins,
        suffixes=tuple(suffixes.split()),
    )


def _video(
    name: str, container: str, *begins: FirstBytes, suffixes: str = "", **rest: Any
) -> Format:
    return Format(
        kind="video",
        name=name,
        container=container,
        begins=begins,
        suffixes=tuple(suffixes.split()),
        **rest,
    )


def _sound(container: str, *begins: FirstBytes, suffixes: str = "", **rest: Any) -> Format:
    return Format(
        kind="audio",
        name="a sound file",
        container=container,
        begins=begins,
        suffixes=tuple(suffixes.split()),
        **rest,
    )


def _other(noun: str, advice: str, *begins: FirstBytes, **rest: Any) -> Format:
    vowel = noun[0].lower() in "aeio" or noun.startswith(("HTML", "SVG", "XML", "xz"))
    name = f"{'an' if vowel else 'a'} {noun}"
    return Format(**{"kind": OTHER, "name": name} | rest, advice=advice, begins=begins)


def _raw(*begins: FirstBytes, **rest: Any) -> Format:
    return _other("raw photo of a camera", "convert it to JPEG or TIFF", *begins, **rest)


_TO_PNG, _UNPACK, _CORPUS = "convert it to PNG", "unpack it", "name it as a corpus"
_TO_FLAC = "convert it to FLAC or WAV"
EMPTY = _other("empty file", "")
RAW = _raw(b"IIU\0", b"IIRO", b"IIRS", b"FUJIFILMCCD-RAW", b"FOVb")  # RW2, ORF, RAF, X3F
SVG = _other("SVG drawing", _TO_PNG, texts=(b"<svg", b"<!doctype svg"))
XML = _other("XML file", "")
# Second bytes, after 0xff, of a frame: version 2.5, 2 and 1, layer 3 and 2.
_MPEG = tuple(
    bytes((0xFF, second)) for second in b"\xe2\xe3\xe4\xe5\xf2\xf3\xf4\xf5\xfa\xfb\xfc\xfd"
)
_ADTS = tuple(bytes((0xFF, second)) for second in b"\xf0\xf1\xf8\xf9")
_RIFF, _OGG = (b"RIFF",), (b"OggS",)
_MOV, _TS = "mov qt mp4 m4v", "ts m2ts mts m2t"
# The first that fits counts.
FORMATS = (
    _image("PNG", PNG, suffixes="png"),
    _image("JPEG", b"\xff\xd8\xff", suffixes="jpg"),
    _image("GIF", b"GIF87a", b"GIF89a", suffixes="gif"),
    _raw(b"II*\0\x10\0\0\0CR", image="TIFF", suffixes=("cr2",)),  # CR2 of Canon
    RAW,
    _image("TIFF", b"II*\0", b"MM\0*", b"II+\0", b"MM\0+", suffixes="tiff"),
    _image("WebP", (8, b"WEBP"), outer=_RIFF, suffixes="webp"),
    _image("BMP", outer=(b"BM",), check=_is_bmp, suffixes="bmp"),
    # Files of boxes, ISO/IEC 14496-12; brands of images, 23008-12.
    _image("AVIF", *_boxes("avif", "avis"), container="mp4", suffixes="avif"),
    _image("AVIF", *_boxes("mif1", "msf1"), check=_names_avif, container="mp4", suffixes="avif"),
    _image(
        "HEIF",
        *_boxes("heic", "heix", "heim", "heis", "hevc", "hevx"),
        container="mp4",
        suffixes="heic",
    ),
    _image("HEIF", *_boxes("mif1", "msf1", "mif2"), container="mp4", suffixes="heif"),
    _raw(*_boxes("crx "), container="mp4", suffixes=("cr3",)),  # CR3 of Canon
    _sound("mp4", *_boxes("M4A ", "M4B ", "M4P "), suffixes="m4a m4b m4p"),
    _video("MP4 or QuickTime", "mp4", *_boxes("qt  "), suffixes="mov"),
    _video("MP4 or QuickTime", "mp4", (4, b"ftyp"), suffixes="mp4"),
    _video(
        "QuickTime",
        "mp4",
        *((4, box) for box in (b"moov", b"mdat", b"wide", b"free", b"skip")),
        suffixes=_MOV,
    ),
    _video("Matroska or WebM", "matroska", b"\x1a\x45\xdf\xa3", suffixes="webm mkv mka"),
    _video("FLV", "flv", b"FLV\x01", suffixes="flv"),
    _video("ASF or WMV", "asf", b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", suffixes="wmv asf wma"),
    _video("MPEG", "mpeg", b"\0\0\x01\xba", suffixes="mpg mpeg mpe vob"),
    _video("AVI", "avi", (8, b"AVI "), outer=_RIFF, suffixes="avi"),
    _video("MPEG transport stream", "mpegts", check=_are_packets, suffixes=_TS),
    _video("MPEG transport stream", "mpegts", check=_are_timed_packets, suffixes="m2ts mts ts m2t"),
    _sound("wav", (8, b"WAVE"), outer=(b"RIFF", b"RIFX", b"RF64", b"BW64"), suffixes="wav"),
    _sound("w64", b"riff\x2e\x91\xcf\x11", suffixes="w64"),
    _sound("aiff", (8, b"AIFF"), (8, b"AIFC"), outer=(b"FORM",), suffixes="aiff aif aifc"),
    _sound("flac", b"fLaC", suffixes="flac"),
    _sound("mp3", b"ID3", suffixes="mp3"),
    _sound("ac3", b"\x0b\x77", check=_is_ac3, suffixes="ac3"),
    _sound("eac3", b"\x0b\x77", check=_is_eac3, suffixes="eac3 ec3"),
    _sound("amr", b"#!AMR", suffixes="amr"),
    _sound("caf", b"caff\0\x01", suffixes="caf"),
    _sound("au", b".snd\0", suffixes="au snd"),
    _sound("ogg", (28, b"OpusHead"), outer=_OGG, suffixes="opus ogg oga"),
    _sound("ogg", (28, b"\x01vorbis"), (28, b"\x7fFLAC"), outer=_OGG, suffixes="ogg oga"),
    _sound("ogg", (28, b"Speex"), outer=_OGG, suffixes="spx ogg oga"),
    _video("Ogg", "ogg", outer=_OGG, suffixes="ogv ogg"),
    _sound("mp3", *_MPEG, check=_is_mpeg_audio, suffixes="mp3 mp2 mpa"),
    _sound("mp3", check=_is_mpeg_audio, suffixes="mp1 mp2 mp3 mpa"),  # layer 1
    _sound("aac", *_ADTS, check=_is_adts, suffixes="aac"),
    _other("JPEG XL image", _TO_PNG, b"\0\0\0\x0cJXL \r\n\x87\n", b"\xff\x0a"),
    _other("JPEG 2000 image", _TO_PNG, b"\0\0\0\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51"),
    _other("Photoshop file", _TO_PNG, b"8BPS"),
    _other("GIMP file", _TO_PNG, b"gimp xcf"),
    _other("OpenEXR image", _TO_PNG, b"\x76\x2f\x31\x01"),
    _other("DICOM image", "export it as PNG with the window that should be seen", (128, b"DICM")),
    _other("FITS image", "export it as PNG with the range that should be seen", b"SIMPLE  ="),
    _other("NIfTI volume", "export its slices as PNG", (344, b"n+1\0"), (344, b"ni1\0")),
    _other("icon", _TO_PNG, b"\0\0\x01\0"),
    SVG,
    _other("MIDI file", "", b"MThd"),
    _other("WavPack sound", _TO_FLAC, b"wvpk"),
    _other("Monkey's Audio sound", _TO_FLAC, b"MAC \x96\x0f", b"MAC \x8c\x0f"),
    _other("True Audio sound", _TO_FLAC, b"TTA1", b"TTA2"),
    _other("Musepack sound", _TO_FLAC, b"MPCK", b"MP+"),
    _other("DSD sound", _TO_FLAC, b"DSD \x1c\0\0\0", b"FRM8"),
    _other("DTS sound", _TO_FLAC, b"\x7f\xfe\x80\x01"),
    _other("Creative Voice file", _TO_FLAC, b"Creative Voice File"),
    _other("RealAudio or RealMedia file", _TO_FLAC, b".RMF\0", b".ra\xfd"),
    _other("PDF document", "", b"%PDF-", kind="pdf", texts=(b"%pdf-",), suffixes=("pdf",)),
    _other("PostScript document", "", b"%!PS", texts=(b"%!ps",)),
    _other("HTML page", "", texts=(b"<!doctype html", b"<html", b"<head", b"<body")),
    _other(
        "pointer of Git LFS",
        "",
        texts=(b"version https://git-lfs",),
        hint="git lfs pull fetches it",
    ),
    _other("ZIP archive", _UNPACK, b"PK\x03\x04", b"PK\x05\x06"),
    _other("RAR archive", _UNPACK, b"Rar!\x1a\x07"),
    _other("7z archive", _UNPACK, b"7z\xbc\xaf\x27\x1c"),
    _other("gzip file", _UNPACK, b"\x1f\x8b"),
    _other("bzip2 file", _UNPACK, b"BZh"),
    _other("xz file", _UNPACK, b"\xfd7zXZ\0"),
    _other("zstd file", _UNPACK, b"\x28\xb5\x2f\xfd"),
    _other("Parquet file", _CORPUS, b"PAR1"),
    _other("Arrow file", _CORPUS, b"ARROW1\0\0"),
    _other("SQLite database", "", b"SQLite format 3\0"),
    _other("file of an old Office program or Thumbs.db", "", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"),
    _other("program", "", b"\x7fELF", b"MZ\x90\0"),
    _other("GGUF model", "", b"GGUF"),
)


def _indexed() -> Mapping[tuple[int, bytes], Sequence[int]]:
    """Returns (offset, two bytes there) -> the places of the rows to look at."""
    index: dict[tuple[int, bytes], list[int]] = {}
    for place, row in enumerate(FORMATS):
        for begin in row.outer or row.begins:
            offset, own = begin if isinstance(begin, tuple) else (0, begin)
            index.setdefault((offset, own[:2]), []).append(place)
    return MappingProxyType(index)


_INDEX = _indexed()
_OFFSETS = sorted({offset for offset, _ in _INDEX})
_UNINDEXED = tuple(  # looked at always
    place for place, row in enumerate(FORMATS) if row.check and not (row.outer or row.begins)
)
_TEXTS = tuple(text for row in FORMATS for text in row.texts)
