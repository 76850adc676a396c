#!/usr/bin/env bash
# The same ten H.264 pictures with B-frames, a tenth of a second each, once in MP4 and once in AVI.
# Decoded with PyAV 18.1.0 (its bundled FFmpeg), both files give the pictures in the right order. But
# where MP4 says 0.0, 0.1, 0.2 ... 0.9 of them, AVI says 0.1 0.3 0.4 0.2 0.6 0.7 0.5 0.9 1.0 0.8: the
# times run back three times, and none of them is wrong by less than a tenth. AVI stores no
# presentation times; the demuxer counts packets, which lie in decoding order, and the decoder hands
# a packet's number on to whatever picture it was read with. Neither a missing value (None) nor a
# warning tells. Who picks frames by `frame.time` (one each second, the one at 12.5 s, until the end
# of a clip) picks others than in MP4, skips some and stops too early. In AVI count the frames, or
# sort the times of a group of pictures, and take the average rate for their distance.
#
# Seen with Python 3.11, Linux x86-64, 2026-11-29. Needs Python 3.11 or newer and the package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check av==18.1.0 numpy==2.3.4
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import av
import numpy as np

NUM, RATE = 10, 10
found = {}
for container in ("mp4", "avi"):
    name = f"clip.{container}"
    with av.open(name, "w") as file:
        stream = file.add_stream("libx264", rate=RATE)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        stream.codec_context.max_b_frames = 2
        for number in range(NUM):  # each brighter than the one before
            grey = np.full((64, 64, 3), 25 * number, np.uint8)
            frame = av.VideoFrame.from_ndarray(grey, format="rgb24")
            frame.pts = number
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    with av.open(name) as file:
        frames = list(file.decode(video=0))
    grey = [int(frame.to_ndarray(format="rgb24").mean()) for frame in frames]
    assert grey == sorted(grey) and len(grey) == NUM, "the pictures come in their order"
    found[container] = [round(float(frame.time), 1) for frame in frames]
    print(f"{container}: {found[container]}")
assert found["mp4"] == [number / RATE for number in range(NUM)]
assert found["avi"] == [0.1, 0.3, 0.4, 0.2, 0.6, 0.7, 0.5, 0.9, 1.0, 0.8], "it has changed"
PYTHON
