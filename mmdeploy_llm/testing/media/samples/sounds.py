"""Generates sounds: WAV files of tones, twins, and headers that claim hours."""

from __future__ import annotations

import io
import struct
import wave
from typing import Any

import numpy as np

from mmdeploy_llm.hooks import MediaLimits

from .pictures import Twins

RATE = 16_000
Wave = np.ndarray[Any, np.dtype[np.float32]]


def samples() -> dict[str, Any]:
    """Returns name -> source, all of different content."""
    return {
        "wav": wav_bytes(tone(0.5, seed=1)),
        "stereo wav": wav_bytes(np.stack([tone(0.4, seed=2), tone(0.4, seed=3)], 1)),
        "wav of another rate": wav_bytes(tone(0.3, seed=4, rate=8000), rate=8000),
        "long wav": wav_bytes(tone(3.0, seed=5)),
    }


def twins() -> Twins:
    """Returns name -> two sources that differ in their last or first bytes only."""
    whole = tone(10.3, seed=6)  # no whole seconds: what is left after the last may be forgotten
    found: Twins = {}
    for name, part in (("last", slice(-RATE // 5, None)), ("first", slice(0, RATE // 2))):
        other = whole.copy()
        other[part] = -0.5 * other[part][::-1]
        found[f"files that differ in their {name} bytes"] = wav_bytes(whole), wav_bytes(other)
    return found


def too_large() -> dict[str, tuple[Any, MediaLimits]]:
    """Returns name -> (source, limits that it exceeds)."""
    slow = wav_bytes(tone(1.0, seed=7), rate=100)  # 16,000 samples: 160 seconds
    return {
        "duration": (wav_bytes(tone(0.5, seed=1)), MediaLimits(max_duration=0.1)),
        "duration of minutes": (slow, MediaLimits(max_duration=60.0)),
    }


def giants() -> dict[str, bytes]:
    """Returns name -> a header that claims 4 GB of sound, without the sound."""
    form = struct.pack("<HHIIHH", 1, 1, RATE, 2 * RATE, 2, 16)
    most = 0xFFFF_FFF0
    head = b"RIFF" + struct.pack("<I", most) + b"WAVEfmt " + struct.pack("<I", len(form)) + form
    return {"wav": head + b"data" + struct.pack("<I", most - 36) + bytes(64)}


def tone(seconds: float, *, seed: int, rate: int = RATE) -> Wave:
    """Returns a tone that rises, with noise, float32 from -1 to 1."""
    rng = np.random.default_rng(seed)
    time = np.arange(int(seconds * rate)) / rate
    swept = np.sin(2 * np.pi * (200 + 300 * seed + 400 * time) * time)
    return (0.6 * swept + 0.1 * rng.standard_normal(len(time))).clip(-1, 1).astype(np.float32)


def wav_bytes(values: Wave, *, rate: int = RATE) -> bytes:
    """Encodes values [samples] or [samples, channels] as 16 bit WAV."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1 if values.ndim == 1 else values.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((values * 32767).astype("<i2").tobytes())
    return buffer.getvalue()
