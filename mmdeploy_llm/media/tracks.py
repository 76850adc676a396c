"""Says whether a file has pictures, sound or both, from what its header lists: no packet is read.

A recorder writes a sound into the same kinds of files as a film: MP4, QuickTime, Matroska, WebM,
Ogg, ASF, FLV and AVI. What a file is, its tracks say, not its brand or its name.

Sources: ISO/IEC 14496-12, 8.3 to 8.4 (handlers, references between tracks); RFC 9559 (Matroska,
TrackType); RFC 3533 (Ogg, first pages); the specification of ASF, 3.3 (stream properties); of FLV,
annex E; of AVI, strh; ISO/IEC 13818-1, 2.4.4 (program map, stream types).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

Read = Callable[[int, int], bytes]  # place and size -> bytes, fewer at the end
PICTURE, SOUND = "picture", "sound"
MAX_BOXES = 10_000
MAX_HEADER = 2**24  # bytes of a header that are looked at
BEGINNING = 2**16  # bytes in which short headers end
_HANDLERS = {b"vide": PICTURE, b"soun": SOUND}
_OGG_CODECS = {
    **dict.fromkeys((b"OpusHead", b"\x01vorbis", b"\x7fFLAC", b"Speex   ", b"PCM     "), SOUND),
    **dict.fromkeys((b"\x80theora", b"BBCD\0", b"OVP80", b"\x01video\0", b"YUV4MPEG"), PICTURE),
}
_ASF_STREAM = bytes.fromhex("9107dcb7b7a9cf118ee600c00c205365")
_ASF_TYPES = {
    bytes.fromhex("409e69f84d5bcf11a8fd00805f5c442b"): SOUND,
    bytes.fromhex("c0ef19bc4d5bcf11a8fd00805f5c442b"): PICTURE,
}
_TRACKS, _ENTRY, _TYPE, _SEGMENT, _CLUSTER = (
    *(b"\x16\x54\xae\x6b", b"\xae", b"\x83"),
    *(b"\x18\x53\x80\x67", b"\x1f\x43\xb6\x75"),
)
_TS_PACKET, _TS_MARK = 188, 0x47
_TS_TYPES = {
    **dict.fromkeys((0x01, 0x02, 0x10, 0x1B, 0x20, 0x21, 0x24, 0x33, 0x42, 0xD1, 0xEA), PICTURE),
    **dict.fromkeys((0x03, 0x04, 0x0F, 0x11, 0x1C, 0x81, 0x87), SOUND),
}
_MATROSKA_TYPES = {1: PICTURE, 2: SOUND}


def tracks_of(container: str, read: Read, size: int) -> frozenset[str]:
    """Returns which of PICTURE and SOUND a file of `size` bytes has; nothing where its header does
    not say it, or is damaged. container: FFmpeg's name of its format."""
    readers: Mapping[str, Callable[[Read, int], Iterator[str]]] = {
        "mp4": _mp4,
        "matroska": _matroska,
        "ogg": _ogg,
        "asf": _asf,
        "flv": _flv,
        "avi": _avi,
        "mpegts": _mpegts,
    }
    return frozenset(readers[container](read, size)) if container in readers else frozenset()


def is_fragmented(blob: bytes) -> bool:
    """Returns whether an MP4 file is a fragment of a film, or made of fragments: its times are then
    those of the whole film."""
    return any(kind == b"moof" for kind, _, _ in _boxes(reader(blob), 0, len(blob)))


def reader(blob: bytes) -> Read:
    """Returns what reads bytes in memory."""
    return lambda place, size: blob[place : place + size]


def _boxes(read: Read, place: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yields kind, begin and end of the content of each box."""
    for _ in range(MAX_BOXES):
        head = read(place, 16)
        if place + 8 > end or len(head) < 8:
            return
        length, kind, begin = int.from_bytes(head[:4], "big"), head[4:8], place + 8
        if length == 1:
            length, begin = int.from_bytes(head[8:16], "big"), place + 16
        stop = end if length == 0 else place + length
        if stop < begin:
            return
        yield kind, begin, min(stop, end)
        place = stop


def _mp4(read: Read, size: int) -> Iterator[str]:
    """Yields the kinds of the tracks; those that show the chapters of others are no pictures. Their
    tables, which may have megabytes, are passed over."""
    tracks, chapters = dict[int, str](), set[int]()
    for kind, begin, end in _boxes(read, 0, size):
        for own, a, b in _boxes(read, begin, end) if kind == b"moov" else ():
            if own == b"trak":
                number, handler = _track(read, a, b, chapters)
                tracks[number] = handler
    yield from (kind for number, kind in tracks.items() if kind and number not in chapters)


def _track(read: Read, begin: int, end: int, chapters: set[int]) -> tuple[int, str]:
    """Returns the number of a track and its kind, "" for another one; adds the numbers of tracks
    with its chapters."""
    number, handler = 0, ""
    for name, a, b in _boxes(read, begin, end):
        if name == b"tkhd":
            header = read(a, 24)
            at = 20 if header[:1] == b"\x01" else 12
            number = int.from_bytes(header[at : at + 4], "big")
        elif name == b"mdia":
            inner = (place for kind, place, _ in _boxes(read, a, b) if kind == b"hdlr")
            handler = next((_HANDLERS.get(read(place + 8, 4), "") for place in inner), "")
        elif name == b"tref":
            for kind, place, stop in _boxes(read, a, b):
                ids = read(place, min(stop - place, BEGINNING)) if kind == b"chap" else b""
                chapters |= {
                    int.from_bytes(ids[at : at + 4], "big") for at in range(0, len(ids), 4)
                }
    return number, handler


def _matroska(read: Read, size: int) -> Iterator[str]:
    """Looks for the list of tracks in the segment, before the first cluster."""
    place = 0
    for _ in range(MAX_BOXES):
        name, begin, end = _element(read, place, size)
        if not name or name == _CLUSTER:
            return
        if name == _TRACKS:
            yield from _entries(read(begin, min(end - begin, MAX_HEADER)))
            return
        place = begin if name == _SEGMENT else end


def _entries(tracks: bytes) -> Iterator[str]:
    for name, begin, end in _elements(tracks, 0, len(tracks)):
        for own, a, b in _elements(tracks, begin, end) if name == _ENTRY else ():
            kind = _MATROSKA_TYPES.get(int.from_bytes(tracks[a:b], "big"))
            if own == _TYPE and kind:
                yield kind


def _elements(data: bytes, place: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    while place < end:
        name, begin, place = _element(reader(data), place, end)
        if not name:
            return
        yield name, begin, place


def _element(read: Read, place: int, size: int) -> tuple[bytes, int, int]:
    """Returns the name of an element of EBML, and begin and end of its content; b"" for none."""
    head = read(place, 12)
    width = 9 - head[0].bit_length() if head and head[0] else 9
    if not 1 <= width <= 4 or len(head) <= width or place >= size:
        return b"", size, size
    name, rest = head[:width], head[width:]
    length = 9 - rest[0].bit_length() if rest[0] else 9
    if length > 8 or len(rest) < length:
        return b"", size, size
    content = int.from_bytes(rest[:length], "big") & (1 << 7 * length) - 1
    begin = place + width + length
    is_open = content == (1 << 7 * length) - 1  # of a recorder that did not know it
    return name, begin, size if is_open else min(begin + content, size)


def _ogg(read: Read, size: int) -> Iterator[str]:
    """Reads the first pages, of which each stream has one."""
    place = 0
    for _ in range(MAX_BOXES):
        page = read(place, 27 + 255 + 64)
        if page[:4] != b"OggS" or len(page) < 28 or not page[5] & 2:
            return
        sizes = page[27 : 27 + page[26]]
        begin = 27 + len(sizes)
        yield from (kind for mark, kind in _OGG_CODECS.items() if page[begin:].startswith(mark))
        place += begin + sum(sizes)


def _asf(read: Read, size: int) -> Iterator[str]:
    head = read(0, min(size, BEGINNING))
    at = head.find(_ASF_STREAM)
    while at >= 0:
        if kind := _ASF_TYPES.get(head[at + 24 : at + 40]):
            yield kind
        at = head.find(_ASF_STREAM, at + 16)


def _flv(read: Read, size: int) -> Iterator[str]:
    """Reads the types of the first tags: flags of the header are often wrong."""
    head, place = read(0, 9), 13
    if len(head) < 9:
        return
    for _ in range(64):
        tag = read(place, 11)
        if len(tag) < 11 or place + 11 > size:
            return
        if kind := {8: SOUND, 9: PICTURE}.get(tag[0] & 31):
            yield kind
        place += 15 + int.from_bytes(tag[1:4], "big")


def _avi(read: Read, size: int) -> Iterator[str]:
    head = read(0, min(size, BEGINNING))
    at = head.find(b"strh")
    while at >= 0:
        if kind := {b"vids": PICTURE, b"auds": SOUND}.get(head[at + 8 : at + 12]):
            yield kind
        at = head.find(b"strh", at + 4)


def _mpegts(read: Read, size: int) -> Iterator[str]:
    """Reads the first program map; a stream of another type may be a picture or a sound."""
    head = read(0, min(size, BEGINNING))
    begin = 4 if head[4:5] == b"\x47" and head[:1] != b"\x47" else 0  # after a time of 4 bytes
    maps = set[int]()
    for at in range(begin, len(head) - _TS_PACKET + 1, _TS_PACKET + begin):
        packet = head[at : at + _TS_PACKET]
        number = int.from_bytes(packet[1:3], "big") & 0x1FFF
        section = _section(packet) if number == 0 or number in maps else b""
        if section[:1] == b"\0":
            places = range(8, len(section) - 3, 4)
            maps |= {int.from_bytes(section[at + 2 : at + 4], "big") & 0x1FFF for at in places}
        elif section[:1] == b"\2":
            place = 12 + (int.from_bytes(section[10:12], "big") & 0xFFF)
            while place + 5 <= len(section):
                yield _TS_TYPES.get(section[place], PICTURE)
                place += 5 + (int.from_bytes(section[place + 3 : place + 5], "big") & 0xFFF)
            return


def _section(packet: bytes) -> bytes:
    """Returns the section that begins in a packet, without its checksum; b"" where none does, or
    where it is longer than the packet."""
    if packet[0] != _TS_MARK or not packet[1] & 0x40 or not packet[3] & 0x10:
        return b""
    at = 5 + packet[4] if packet[3] & 0x20 else 4
    at += 1 + packet[at] if at < len(packet) else 0
    length = int.from_bytes(packet[at + 1 : at + 3], "big") & 0xFFF
    end = at + 3 + length - 4
    return packet[at:end] if end <= len(packet) else b""
