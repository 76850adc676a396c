"""Makes sound files: WAV by hand, what needs an encoder by PyAV."""

import io
import struct

import av
import numpy as np

RATE = 16000


def noise(seconds=0.5, channels=1, rate=RATE, seed=0):
    """Returns int16 samples [samples, channels]."""
    shape = (round(seconds * rate), channels)
    return np.random.default_rng(seed).integers(-(2**14), 2**14, shape, dtype=np.int16)


def wav(data, *, code=1, bits=16, channels=1, rate=RATE, size=None, begin=b"RIFF", chunks=b""):
    """Returns a WAV file. data: bytes of the samples; size: what the header says they are; chunks:
    what stands before them."""
    block = channels * bits // 8
    form = struct.pack("<HHIIHH", code, channels, rate, rate * block, block, bits)
    size = len(data) if size is None else size
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + chunks
    body += b"data" + struct.pack("<I", size) + data
    return begin + struct.pack("<I", min(len(body), 2**32 - 1)) + body


def wav16(samples, rate=RATE, **fields):
    """Returns a WAV file of int16 samples [samples, channels]."""
    return wav(samples.tobytes(), channels=samples.shape[1], rate=rate, **fields)


def encoded(samples, codec, container, rate=RATE, sample_format=None, options=None, muxing=None):
    """Returns int16 samples [samples, channels] in another format. options: of the codec; muxing:
    of the container."""
    buffer = io.BytesIO()
    layout = {1: "mono", 2: "stereo", 6: "5.1"}[samples.shape[1]]
    with av.open(buffer, "w", format=container, options=muxing or {}) as file:
        stream = file.add_stream(codec, rate=rate, layout=layout, options=options or {})
        if sample_format:
            stream.format = sample_format
        frame = av.AudioFrame.from_ndarray(
            np.ascontiguousarray(samples.reshape(1, -1)), format="s16", layout=layout
        )
        frame.sample_rate = rate
        frame.pts = 0
        for packet in (*stream.encode(frame), *stream.encode(None)):
            file.mux(packet)
    return buffer.getvalue()


def floats(samples):
    """Returns what transformers reads of int16 samples: the mean of the channels of soundfile's
    floats."""
    values = samples.astype(np.float32) / np.float32(32768)
    return values[:, 0] if values.shape[1] == 1 else values.T.mean(axis=0)
