#!/usr/bin/env bash
# PyAV 18.1.0 says of `reformat(dst_color_trc=...)`: "This sets frame metadata only; it does not
# perform a pixel-level transfer function conversion." With the FFmpeg 8 in its wheel it does convert:
# the grey bars of a PQ frame (SMPTE ST 2084, BT.2020) come back as 73 108 142 189 253 255 255 where
# `to_ndarray(format="rgb24")` gives the code values 75 95 111 127 146 165 190: all light above
# 203 cd/m2 is clipped to white, nothing is compressed. And the table for it is made anew for each
# frame: seconds of CPU for a small picture where the plain conversion takes less than a millisecond. Who
# tags HDR frames as BT.709 "for the metadata" changes the picture, and waits for it. A filter graph
# (`scale=out_transfer=bt709:intent=perceptual`) makes the table once; or compute the curves.
#
# Seen with Python 3.11, Linux x86-64, 2026-11-29. Needs Python 3.11 or newer and the package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check av==18.1.0 numpy==2.3.4
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import time

import av
import numpy as np

print("av", av.__version__, "libswscale", ".".join(map(str, av.library_versions["libswscale"])))
LIGHT = np.array([10, 26, 50, 100, 203, 400, 1000])  # cd/m2
WIDTH, HEIGHT, BAR = 16 * len(LIGHT), 32, 16
power = (LIGHT / 10_000) ** 0.1593017578125
codes = ((0.8359375 + 18.8515625 * power) / (1 + 18.6875 * power)) ** 78.84375
frame = av.VideoFrame(WIDTH, HEIGHT, "yuv420p10le")
for plane, values in zip(frame.planes, (np.rint(64 + 876 * codes).repeat(BAR), [512], [512])):
    rows = np.zeros((plane.height, plane.line_size // 2), np.uint16)
    rows[:, : plane.width] = values
    plane.update(rows.tobytes())
frame.colorspace, frame.color_range = 9, 1  # BT.2020, limited
frame.color_trc, frame.color_primaries = 16, 9  # PQ, BT.2020


def timed(call):
    began = time.process_time()
    pixels = call()
    return pixels[HEIGHT // 2, BAR // 2 :: BAR, 0].tolist(), time.process_time() - began


plain, short = timed(lambda: frame.to_ndarray(format="rgb24"))
tagged, long = timed(
    lambda: frame.reformat(
        format="rgb24", dst_color_trc=1, dst_color_primaries=1, threads=1
    ).to_ndarray()
)
print(f"light, cd/m2:      {LIGHT.tolist()}")
print(f"rgb24:             {plain}, {1000 * short:.1f} ms")
print(f"rgb24, tagged 709: {tagged}, {1000 * long:.1f} ms")
assert "metadata only" in av.VideoFrame.reformat.__doc__ + (
    av.video.reformatter.VideoReformatter.reformat.__doc__
), "the documentation has changed"
assert plain == [75, 95, 111, 127, 146, 165, 190], "it has changed"
assert tagged[-3:] == [253, 255, 255] or tagged[-2:] == [255, 255], "it has changed"
assert long > 20 * short, "it has changed"
PYTHON
