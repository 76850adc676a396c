"""Writes TIFF files by the specification (TIFF 6.0, section 2), without a library for images: what
is in them is known from how they are made."""

import struct
import zlib

import numpy as np

UNSIGNED, SIGNED, FLOAT = 1, 2, 3  # SampleFormat
GRAY, RGB, PALETTE, CMYK = 1, 2, 3, 5  # PhotometricInterpretation
SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 7: 1, 12: 8}  # of types: byte, text, short, long, bytes, double
FORMS = {1: "B", 3: "H", 4: "I", 12: "d"}
DEFLATE, PACKBITS = 8, 32773


def tiff(pixels, photometric=None, **how):
    """Returns a file of one page, see `pages`."""
    return pages([page(pixels, photometric, **how)], how.get("order", "<"))


def page(pixels, photometric=None, *, order="<", bits=None, planar=False, tile=None, rows=None,
         compression=1, tags=None, sparse=()):  # fmt: skip
    """Returns (tags, blocks) of a page. pixels: [H, W] or [H, W, samples]; `bits` of a sample where
    it has less than its dtype. tile: (height, width) of tiles; rows: of a strip. sparse: numbers of
    blocks that are left out, as programs for maps do."""
    cube = pixels if pixels.ndim == 3 else pixels[:, :, None]
    height, width, samples = cube.shape
    if photometric is None:
        photometric = RGB if samples in (3, 4) else GRAY
    sample = {"i": SIGNED, "f": FLOAT}.get(cube.dtype.kind, UNSIGNED)
    block = tile or (rows or height, width)
    planes = [cube[:, :, [n]] for n in range(samples)] if planar else [cube]
    blocks = [
        _packed(_block(plane, top, left, block, is_tile=bool(tile)), order, bits)
        for plane in planes
        for top in range(0, height, block[0])
        for left in range(0, width, block[1])
    ]
    squeeze = {1: bytes, DEFLATE: zlib.compress, PACKBITS: _packbits}[compression]
    blocks = [b"" if n in sparse else squeeze(data) for n, data in enumerate(blocks)]
    found = {
        256: (4, [width]),
        257: (4, [height]),
        258: (3, [bits or cube.dtype.itemsize * 8] * samples),
        259: (3, [compression]),
        262: (3, [photometric]),
        277: (3, [samples]),
        284: (3, [2 if planar else 1]),
        339: (3, [sample] * samples),
    }
    found |= {322: (4, [block[1]]), 323: (4, [block[0]])} if tile else {278: (4, [block[0]])}
    return found | (tags or {}), blocks, (324, 325) if tile else (273, 279)


def pages(made, order="<"):
    """Returns a file of these pages."""
    body, places = bytearray(struct.pack(order + "2sHI", _mark(order), 42, 0)), []
    for tags, blocks, (offsets, counts) in made:
        starts = []
        for data in blocks:
            starts.append(len(body) if data else 0)
            body += data + bytes(len(data) % 2)
        tags = tags | {offsets: (4, starts), counts: (4, [len(data) for data in blocks])}
        fields = b""
        for tag, (kind, values) in sorted(tags.items()):
            data = values if isinstance(values, bytes) else struct.pack(
                f"{order}{len(values)}{FORMS[kind]}", *values)  # fmt: skip
            count = len(data) // SIZES[kind]
            if len(data) > 4:
                place = len(body)
                body += data + bytes(len(data) % 2)
                data = struct.pack(order + "I", place)
            fields += struct.pack(order + "HHI", tag, kind, count) + data.ljust(4, b"\0")
        places.append((len(body), len(body) + 2 + len(fields)))
        body += struct.pack(order + "H", len(tags)) + fields + bytes(4)
    at = 4
    for start, after in places:
        struct.pack_into(order + "I", body, at, start)
        at = after
    return bytes(body)


def _mark(order):
    return b"II" if order == "<" else b"MM"


def _block(plane, top, left, size, *, is_tile):
    found = plane[top : top + size[0], left : left + size[1]]
    if is_tile:  # tiles at the edges are whole
        missing = [(0, size[0] - found.shape[0]), (0, size[1] - found.shape[1]), (0, 0)]
        found = np.pad(found, missing)
    return found


def _packed(values, order, bits):
    if bits is None or bits == values.dtype.itemsize * 8:
        return values.astype(values.dtype.newbyteorder(order)).tobytes()
    rows = []
    for row in values.reshape(len(values), -1):  # each row begins with a byte
        text = "".join(f"{int(value):0{bits}b}" for value in row)
        text = text.ljust(-(-len(text) // 8) * 8, "0")
        rows.append(int(text, 2).to_bytes(len(text) // 8, "big"))
    return b"".join(rows)


def _packbits(data):
    parts = [data[at : at + 128] for at in range(0, len(data), 128)]
    return b"".join(bytes([len(part) - 1]) + part for part in parts)
