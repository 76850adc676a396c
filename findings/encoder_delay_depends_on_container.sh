#!/usr/bin/env bash
# One second of silence, a click, one second of silence: encoded by the same encoders (PyAV 18.1.0 and
# its bundled FFmpeg) and put into several containers, then decoded. Where is the click?
#
#                         by counting samples     by frame.time
#     WAV, FLAC           right                   right
#     AAC in MP4, MKV     right                   right
#     AAC in ADTS, TS     21.3 ms late            21.3 ms late
#     AAC in FLV          21.3 ms late            20.6 ms late
#     MP3 file            right                   23.0 ms late
#     MP3 in MKV, MP4     right                   right
#     MP3 in AVI          23.0 ms late            23.0 ms late
#     Opus in Ogg, WebM   right                   right
#
# Lossy encoders put silence in front. MP4, MKV, Ogg and the header of an MP3 file say how much, and
# the decoder cuts it off; ADTS, TS, FLV and AVI cannot say it, so it stays. In an MP3 file the silence
# is cut off but the times of frames still count it: samples and times of the same frame disagree. So
# `frame.time` is not the better clock of the two (it is wrong for the most common file of all), and
# remuxing without encoding anew moves the sound. The ends differ too: 2.000 s of sound come back with
# 0 (WAV, FLAC, Ogg, WebM, MP3 file), 256 (AAC in MP4), 648 (Opus in MP4) to 1,920 samples (MP3 in AVI)
# more, or as many as the encoder's last frame holds.
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
RATE, CLICK = 48_000, 48  # samples
sound = np.zeros(2 * RATE, np.int16)
sound[RATE - CLICK // 2 : RATE + CLICK // 2] = 29_000
EXPECTED = {  # file: (codec, late by counting, late by frame.time), in tenths of milliseconds
    "click.wav": ("pcm_s16le", 0, 0),
    "click.flac": ("flac", 0, 0),
    "click.m4a": ("aac", 0, 0),
    "aac.mkv": ("aac", 0, 0),
    "click.aac": ("aac", 213, 213),
    "click.ts": ("aac", 213, 213),
    "click.flv": ("aac", 213, 206),
    "click.mp3": ("libmp3lame", 0, 230),
    "mp3.mkv": ("libmp3lame", 0, 0),
    "mp3.mp4": ("libmp3lame", 0, 0),
    "click.avi": ("libmp3lame", 230, 230),
    "click.ogg": ("libopus", 0, 0),
    "click.webm": ("libopus", 0, 0),
}


def write(name, codec):
    with av.open(name, "w") as file:
        stream = file.add_stream(codec, rate=RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray(sound[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts = RATE, 0
        own = stream.codec_context
        split = av.AudioResampler(own.format.name, "mono", RATE, own.frame_size or 1024)
        for piece in split.resample(frame) + split.resample(None):
            file.mux(stream.encode(piece))
        file.mux(stream.encode(None))


def lateness(name):
    """Returns how late the click is, by counting samples and by the time of its frame, in ms."""
    with av.open(name) as file:
        frames = list(file.decode(audio=0))
    pieces = [frame.to_ndarray().astype(np.float32).reshape(-1) for frame in frames]
    loudest, begin = int(np.argmax(np.abs(np.concatenate(pieces)))), 0
    for frame in frames:
        if begin + frame.samples > loudest:
            by_time = float(frame.time) + (loudest - begin) / RATE
            return 1000 * (loudest / RATE - 1), 1000 * (by_time - 1)
        begin += frame.samples


for name, (codec, *expected) in EXPECTED.items():
    write(name, codec)
    found = lateness(name)
    print(f"{name:11s} {codec:10s} by counting {found[0]:5.1f} ms late, by time {found[1]:5.1f}")
    for late, tenths in zip(found, expected):
        assert abs(10 * late - tenths) <= 12, f"{name} has changed"  # the click is 1 ms long
PYTHON
