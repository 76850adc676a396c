#!/usr/bin/env bash
# A sound file is made mono for a speech model with PyAV 18.1.0: AudioResampler(format, "mono", rate).
# The only thing that differs is the format asked for, 16-bit integers (divided by 32,768 afterwards)
# or floats. A tone of amplitude 0.5 is in these channels of a FLAC file; amplitude of the mono sound:
#
#                              "s16", "s32"    "flt", "fltp", "dbl"    the mean of channels
#     stereo, both             0.50            0.71                    0.50
#     stereo, left only        0.25            0.35                    0.25
#     5.1, all                 0.50            1.71                    0.50
#     5.1, centre (speech)     0.15            0.50                    0.08
#     5.1, front left          0.10            0.35                    0.08
#     5.1, low frequencies     0               0                       0.08
#
# libswresample mixes with weights of equal power (0.71 for a side on its way to the middle). For
# integers it scales them down until no sum can overflow, for floats it does not (`rematrix_maxval`),
# so stereo is 3 dB louder and 5.1 10.7 dB, and the floats leave -1 ... 1. A format for storing numbers
# has no business with loudness, so one expects the rounding to differ and nothing else; and a mono
# file shows no difference at all. Models that take the level in (any without a normalised log-mel),
# thresholds of silence, and the clipping where a float sound is saved as 16 bits (0.5 became 1.71)
# give results that depend on it. Nor is either of them the mean that soundfile and librosa users take:
# in 5.1 speech sits in the centre, which comes out at 0.15, 0.50 or 0.08. Choose one: ask for the
# channels as they are and mix them yourself.
#
# The files are written by soundfile 0.14.0.
#
# Seen with Python 3.11, Linux x86-64, 2026-11-29. Needs Python 3.11 or newer and the package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
	av==18.1.0 soundfile==0.14.0 numpy==2.3.4
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import av
import numpy as np
import soundfile

RATE, AMPLITUDE = 48_000, 0.5
TONE = AMPLITUDE * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)
FORMATS = ("s16", "s32", "flt", "fltp", "dbl")
LAYOUTS = {"stereo": 2, "5.1": 6, "mono": 1}
CASES = (  # layout, channels with the tone, amplitudes: of integers, of floats, of the mean
    ("stereo", (0, 1), 0.5, 0.7071, 0.5),
    ("stereo", (0,), 0.25, 0.3536, 0.25),
    ("5.1", (0, 1, 2, 3, 4, 5), 0.5, 1.7071, 0.5),
    ("5.1", (2,), 0.1464, 0.5, 0.0833),
    ("5.1", (0,), 0.1036, 0.3536, 0.0833),
    ("5.1", (3,), 0, 0, 0.0833),
    ("mono", (0,), 0.5, 0.5, 0.5),
)


def mono(name, sample_format, rate):
    """Returns the samples of the file as PyAV mixes them, as floats."""
    resampler = av.AudioResampler(sample_format, "mono", rate)
    with av.open(name) as file:
        assert file.streams.audio[0].layout.name.startswith(layout)  # "5.1(side)"
        frames = [part for frame in file.decode(audio=0) for part in resampler.resample(frame)]
    samples = np.concatenate([one.to_ndarray().reshape(-1) for one in frames])
    return samples / 2.0 ** (8 * samples.itemsize - 1) if samples.dtype.kind == "i" else samples


for layout, own, integers, floats, mean in CASES:
    channels = np.zeros((RATE, LAYOUTS[layout]))
    channels[:, list(own)] = TONE[:, None]
    soundfile.write("tone.flac", channels, RATE, subtype="PCM_16")
    peak = np.abs(soundfile.read("tone.flac", always_2d=True)[0].mean(axis=1)).max()
    assert abs(peak - mean) < 0.001
    for rate in (RATE, 16_000):
        found = {one: float(np.abs(mono("tone.flac", one, rate)[500:-500]).max()) for one in FORMATS}
        shown = ", ".join(f"{one} {peak:.2f}" for one, peak in found.items())
        print(f"{layout:6s} channels {own}, {rate} Hz: {shown}; the mean {mean:.2f}")
        for one, peak in found.items():
            expected = integers if one.startswith("s") else floats
            assert abs(peak - expected) < 0.002, f"{one} has changed"
PYTHON
