#!/usr/bin/env bash
# A TIFF says with the tag PhotometricInterpretation = 0 (WhiteIsZero) that its zeros are white:
# fax, many scanners and X-ray archives write it. Pillow 12.0.0 honours it for pictures of 8 bits and
# turns the values over while it reads them, but leaves those of 16 bits as they are: the same
# picture, saved once in 8 and once in 16 bits, comes back once right and once as a negative. No
# warning, and `mode` ("L" and "I;16") does not tell; only tag 262 does. A model that reads scans sees
# white text on black. Who converts by hand must not invert both: ask tag 262 and the mode together.
#
# The files are written by tifffile 2025.10.16, whose own reader returns the stored values in both
# cases and leaves the meaning to the caller.
#
# Seen with Python 3.11, Linux x86-64, 2026-11-29. Needs Python 3.11 or newer and the package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
	pillow==12.0.0 tifffile==2025.10.16 numpy==2.3.4
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import tifffile
from PIL import Image

WHITE_IS_ZERO = 0
found = {}
for bits, dtype in ((8, np.uint8), (16, np.uint16)):
    most = 2**bits - 1
    # Left a white half (zeros, by the tag), right a black one.
    stored = np.repeat(np.array([[0, 0, most, most]], dtype), 4, axis=0)
    tifffile.imwrite(f"{bits}.tif", stored, photometric="miniswhite")
    with Image.open(f"{bits}.tif") as picture:
        assert picture.tag_v2[262] == WHITE_IS_ZERO
        left, right = np.asarray(picture)[0, [0, -1]].tolist()
    found[bits] = "right" if (left, right) == (most, 0) else "a negative"
    print(f"{bits:2d} bits: the white half is read as {left}, the black one as {right}: {found[bits]}")
assert found == {8: "right", 16: "a negative"}, "the behaviour has changed"
PYTHON
