#!/usr/bin/env bash
# One second of silence, a click, one second of silence: encoded once, and the same packets put into a
# file twice with PyAV 18.1.0, as the only track: from second 0 on, and from second 1.5 on, as a track is
# that begins after its picture. Where is the click in the decoded samples, and by the times of frames?
#
#                     from 0: counted, by time     from 1.5: counted, by time (1.5 subtracted)
#     AAC in MP4      1.000    1.000               1.021    1.000
#     MP3 in MP4      1.000    1.000               1.023    1.000
#     Opus in MP4     1.000    1.000               1.000    1.000
#     AAC in MKV      1.000    1.000               1.000    1.000
#     MP3 in MKV      1.000    1.000               1.000    1.000
#     Opus in MKV     1.000    1.000               1.000    1.000
#
# The silence that the encoder puts in front has negative times, which MP4 cuts off by an edit list.
# Where the track begins late no time is negative: the muxer writes an empty edit of 1.479 s, and nothing
# is cut off. By their times the samples are right, but there are 1,024 more of them (1,105 in MP3). So
# a file whose sound is right by counting samples is 21 ms late after a remux that delays it, although
# no packet has changed, and a program that adds 1.5 s of silence to the decoded samples is late by that.
# In MP3 files it is the other way round: counting is right and times are late (see
# encoder_delay_depends_on_container.sh). Silence up to the first frame's own time is right in all six.
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

av.logging.set_level(None)
print(f"PyAV {av.__version__}, libavformat {'.'.join(map(str, av.library_versions['libavformat']))}")
RATE, CLICK, LATE = 48_000, 48, 1.5
sound = np.zeros(2 * RATE, np.int16)
sound[RATE - CLICK // 2 : RATE + CLICK // 2] = 29_000
EXPECTED = {  # file: codec, ms by which counting is late from 0 on and from 1.5 on
    "aac.mp4": ("aac", 0, 21.3),
    "mp3.mp4": ("libmp3lame", 0, 23.0),
    "opus.mp4": ("libopus", 0, 0),
    "aac.mkv": ("aac", 0, 0),
    "mp3.mkv": ("libmp3lame", 0, 0),
    "opus.mkv": ("libopus", 0, 0),
}


def write(name, codec, begin):
    with av.open(name, "w") as file:
        stream = file.add_stream(codec, rate=RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray(sound[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts = RATE, 0
        own = stream.codec_context
        split = av.AudioResampler(own.format.name, "mono", RATE, own.frame_size or 1024)
        packets = []
        for piece in [*split.resample(frame), *split.resample(None), None]:
            packets += stream.encode(piece)
        for packet in packets:
            if packet.size:
                shift = round(begin / packet.time_base)
                packet.pts, packet.dts = packet.pts + shift, packet.dts + shift
                file.mux(packet)


def click(name, begin):
    """Returns where the click is by counting samples, and by the times of frames, in seconds."""
    with av.open(name) as file:
        frames = list(file.decode(audio=0))
    pieces = [np.abs(frame.to_ndarray().astype(np.float64)).reshape(-1) for frame in frames]
    counted, by_time, loudest, at = 0.0, 0.0, 0.0, 0
    for frame, piece in zip(frames, pieces, strict=True):
        if piece.max() > loudest:
            loudest = float(piece.max())
            counted = (at + int(piece.argmax())) / RATE
            by_time = float(frame.time) + int(piece.argmax()) / RATE - begin
        at += len(piece)
    return counted, by_time


for name, (codec, *late) in EXPECTED.items():
    shown = []
    for begin, expected in zip((0.0, LATE), late, strict=True):
        write(name, codec, begin)
        counted, by_time = click(name, begin)
        shown.append(f"from {begin:g}: counted {counted:.4f}, by time {by_time:.4f}")
        assert abs(1000 * (counted - 1) - expected) < 1.5, f"{name} has changed: {counted}"
        assert abs(by_time - 1) < 0.0025, f"{name} has changed: {by_time}"
    print(f"{name:9s} {'; '.join(shown)}")
PYTHON
