"""Maps high dynamic range to the range of pictures that models know, by the curves of the ITU.

Code values of PQ and HLG become light (ITU-R BT.2100), bright light is compressed as in ITU-R
BT.2390, the colours become those of BT.709, and light becomes code values by the inverse of
BT.1886, a power of 2.4. White of graphics, 203 cd/m2 in ITU-R BT.2408, is white in the picture.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from PIL import Image, ImageFilter

PQ, HLG = 16, 18  # transfer characteristics, ITU-T H.273
NUM_STEPS = 33  # along each colour of the table
PEAK = 1000.0  # cd/m2 of the brightest light that is told apart, the display of BT.2100's HLG
WHITE = 203.0  # cd/m2
TO_709 = np.array(  # BT.2020 to BT.709, ITU-R BT.2407, section 2
    [[1.6605, -0.5876, -0.0728], [-0.1246, 1.1329, -0.0083], [-0.0182, -0.1006, 1.1187]]
)
LUMA = np.array([0.2627, 0.6780, 0.0593])  # BT.2020
M1, M2, C1, C2, C3 = 2610 / 16384, 2523 / 32, 3424 / 4096, 2413 / 128, 2392 / 128  # SMPTE ST 2084


def to_sdr(image: Image.Image, transfer: int) -> Image.Image:
    """Converts an RGB image of code values of PQ or HLG."""
    return image.filter(_table(transfer))


@cache
def _table(transfer: int) -> ImageFilter.Color3DLUT:
    steps = np.linspace(0, 1, NUM_STEPS)
    blue, green, red = np.meshgrid(steps, steps, steps, indexing="ij")  # red changes first
    code = np.stack([red, green, blue], axis=-1).reshape(-1, 3)
    light = _compressed(_light_of_pq(code) if transfer == PQ else _light_of_hlg(code))
    shown = np.clip(light @ TO_709.T / WHITE, 0, 1) ** (1 / 2.4)
    return ImageFilter.Color3DLUT(NUM_STEPS, shown.astype(np.float32).ravel())


def _light_of_pq(code: np.ndarray) -> np.ndarray:
    """Returns cd/m2 of code values from 0 to 1."""
    root = code ** (1 / M2)
    light: np.ndarray = 10_000 * (np.maximum(root - C1, 0) / (C2 - C3 * root)) ** (1 / M1)
    return light


def _pq_of_light(light: np.ndarray | float) -> np.ndarray:
    power = (np.asarray(light) / 10_000) ** M1
    code: np.ndarray = ((C1 + C2 * power) / (1 + C3 * power)) ** M2
    return code


def _light_of_hlg(code: np.ndarray) -> np.ndarray:
    """Returns cd/m2 on a display of 1,000 cd/m2, of code values [n, 3] from 0 to 1."""
    a, b, c = 0.17883277, 0.28466892, 0.55991073
    scene = np.where(code <= 0.5, code**2 / 3, (np.exp((code - c) / a) + b) / 12)
    luma = np.maximum(scene @ LUMA, 1e-9)[:, None]
    light: np.ndarray = PEAK * luma**0.2 * scene
    return light


def _compressed(light: np.ndarray) -> np.ndarray:
    """Compresses light [n, 3] up to PEAK into what is up to WHITE, all colours of a pixel alike:
    the curve of BT.2390, section 5.4, over the brightest of them."""
    brightest = np.maximum(light.max(axis=1, keepdims=True), 1e-6)
    peak = float(_pq_of_light(PEAK))
    code = np.minimum(_pq_of_light(brightest) / peak, 1)
    largest = float(_pq_of_light(WHITE)) / peak
    knee = 1.5 * largest - 0.5
    t = np.clip((code - knee) / (1 - knee), 0, 1)
    curve = (
        (2 * t**3 - 3 * t**2 + 1) * knee
        + (t**3 - 2 * t**2 + t) * (1 - knee)
        + (-2 * t**3 + 3 * t**2) * largest
    )
    mapped = _light_of_pq(np.where(code < knee, code, curve) * peak)
    compressed: np.ndarray = light * (mapped / brightest)
    return compressed
