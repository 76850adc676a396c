"""Writes ICC profiles by the specification (ICC.1:2001-04), without a library for colours."""

import struct

import numpy as np

# Colorants under D50: columns are red, green, blue; rows X, Y, Z. Of Lindbloom's tables.
SRGB = np.array([[0.4360747, 0.3850649, 0.1430804], [0.2225045, 0.7168786, 0.0606169],
                 [0.0139322, 0.0971045, 0.7141733]])  # fmt: skip
ADOBE = np.array([[0.6097559, 0.2052401, 0.1492240], [0.3111242, 0.6256560, 0.0632197],
                  [0.0194811, 0.0608902, 0.7448387]])  # fmt: skip
P3 = np.array([[0.5151, 0.2920, 0.1571], [0.2412, 0.6922, 0.0666], [-0.0011, 0.0419, 0.7841]])
WHITE = (0.9642, 1.0, 0.8249)


def srgb_curve(light):
    return np.where(
        light <= 0.0031308, 12.92 * light, 1.055 * np.maximum(light, 0) ** (1 / 2.4) - 0.055
    )


def srgb_light(value):
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def rgb_profile(colorants, gamma):
    """gamma: a number, or None for sRGB's curve."""
    tags = {name: _xyz(colorants[:, n]) for n, name in enumerate((b"rXYZ", b"gXYZ", b"bXYZ"))}
    tags |= dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), _curve(gamma))
    return _profile(b"RGB ", b"XYZ ", tags)


def gray_profile(gamma):
    return _profile(b"GRAY", b"XYZ ", {b"kTRC": _curve(gamma)})


def cmyk_profile(labs):
    """labs: [2, 2, 2, 2, 3], L (0..100), a and b at the corners of C, M, Y, K."""
    scaled = np.rint(labs * (2.55, 1, 1) + (0, 128, 128)).astype(np.uint8)
    ramp, one = bytes(range(256)), 65536
    table = struct.pack(">4s4xBBBx9i", b"mft1", 4, 3, 2, one, 0, 0, 0, one, 0, 0, 0, one)
    return _profile(b"CMYK", b"Lab ", {b"A2B0": table + ramp * 4 + scaled.tobytes() + ramp * 3},
                    kind=b"prtr")  # fmt: skip


def _xyz(values):
    return struct.pack(">4s4x3i", b"XYZ ", *(round(value * 65536) for value in values))


def _curve(gamma):
    if gamma is not None:
        return struct.pack(">4s4xIH", b"curv", 1, round(gamma * 256))
    table = np.rint(srgb_light(np.linspace(0, 1, 1024)) * 65535).astype(">u2")
    return struct.pack(">4s4xI", b"curv", 1024) + table.tobytes()


def _profile(space, between, tags, kind=b"mntr"):
    text = b"made for a test\0"
    tags = tags | {
        b"wtpt": _xyz(WHITE),
        b"cprt": struct.pack(">4s4x", b"text") + text,
        b"desc": struct.pack(">4s4xI", b"desc", len(text)) + text + bytes(78),
    }
    table, body = b"", b""
    start = 128 + 4 + 12 * len(tags)
    for name, data in tags.items():
        table += struct.pack(">4sII", name, start + len(body), len(data))
        body += data + bytes(-len(data) % 4)
    size = start + len(body)
    head = struct.pack(">I4sI4s4s4s", size, bytes(4), 0x02400000, kind, space, between)
    head += struct.pack(">6H4s", 2026, 1, 1, 0, 0, 0, b"acsp") + bytes(28)
    head += struct.pack(">3i", *(round(value * 65536) for value in WHITE))
    return head.ljust(128, b"\0") + struct.pack(">I", len(tags)) + table + body
