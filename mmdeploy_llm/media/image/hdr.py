"""Maps high dynamic range to the range of pictures that models know, by the curves of the ITU.

Code values of PQ and HLG become light (ITU-R BT.2100), bright light is compressed as in ITU-R
BT.2390, the colours become those of BT.709, and light becomes code values by the inverse of
BT.1886, a power of 2.4. White of graphics, 203 cd/m2 in ITU-R BT.2408, is white in the picture.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

PQ, HLG = 16, 18  # transfer characteristics, ITU-T H.273
NUM_CODES = 4096  # of the tables of light
NUM_ROWS = 64  # that are converted at once, so that they stay in the cache
PEAK = 1000.0  # cd/m2 of the brightest light that is told apart, the display of BT.2100's HLG
WHITE = 203.0  # cd/m2
TO_709 = np.array(  # BT.2020 to BT.709, ITU-R BT.2407, section 2
    [[1.6605, -0.5876, -0.0728], [-0.1246, 1.1329, -0.0083], [-0.0182, -0.1006, 1.1187]],
    np.float32,
)
LUMA = np.array([0.2627, 0.6780, 0.0593], np.float32)  # BT.2020
M1, M2, C1, C2, C3 = 2610 / 16384, 2523 / 32, 3424 / 4096, 2413 / 128, 2392 / 128  # SMPTE ST 2084


def to_sdr(image: Image.Image, transfer: int) -> Image.Image:
    """Converts an RGB image of code values of PQ or HLG."""
    code = np.asarray(image)
    levels = np.arange(256) / 255
    light = np.empty((*code.shape[:2], 3), np.float32)
    for row in range(0, len(code), NUM_ROWS):
        part = code[row : row + NUM_ROWS]
        if transfer == PQ:
            found = _light_of_pq(levels).astype(np.float32)[part]
        else:
            found = _light_of_hlg(_scene_of_hlg(levels).astype(np.float32)[part])
        light[row : row + NUM_ROWS] = _compressed(found) @ TO_709.T
    scaled = np.sqrt(np.clip(light / WHITE, 0, 1))  # so that dark steps are fine, too
    codes = np.rint(255 * np.linspace(0, 1, NUM_CODES) ** (2 / 2.4)).astype(np.uint8)
    return Image.fromarray(codes[np.rint(scaled * (NUM_CODES - 1)).astype(np.uint16)])


def _light_of_pq(code: np.ndarray) -> np.ndarray:
    """Returns cd/m2 of code values from 0 to 1."""
    root = code ** (1 / M2)
    light: np.ndarray = 10_000 * (np.maximum(root - C1, 0) / (C2 - C3 * root)) ** (1 / M1)
    return light


def _pq_of_light(light: np.ndarray | float) -> np.ndarray:
    power = (np.asarray(light) / 10_000) ** M1
    code: np.ndarray = ((C1 + C2 * power) / (1 + C3 * power)) ** M2
    return code


def _scene_of_hlg(code: np.ndarray) -> np.ndarray:
    """Returns the light of the scene, from 0 to 1, of code values from 0 to 1."""
    a, b, c = 0.17883277, 0.28466892, 0.55991073
    scene: np.ndarray = np.where(code <= 0.5, code**2 / 3, (np.exp((code - c) / a) + b) / 12)
    return scene


def _light_of_hlg(scene: np.ndarray) -> np.ndarray:
    """Returns cd/m2 on a display of 1,000 cd/m2, of the light of a scene [..., 3]."""
    luma = np.maximum(scene @ LUMA, 1e-9)[..., None]
    light: np.ndarray = PEAK * luma**0.2 * scene
    return light


def _compressed(light: np.ndarray) -> np.ndarray:
    """Compresses light [..., 3] up to PEAK into what is up to WHITE, all colours of a pixel alike,
    by the brightest of them."""
    brightest = np.clip(light.max(axis=-1, keepdims=True), 0, PEAK)
    steps = np.linspace(0, 1, NUM_CODES)  # of the root of the light
    gains = _curve(PEAK * steps**2).astype(np.float32)
    place = np.rint(np.sqrt(brightest / PEAK) * (NUM_CODES - 1)).astype(np.uint16)
    compressed: np.ndarray = np.minimum(light, PEAK) * gains[place]
    return compressed


def _curve(light: np.ndarray) -> np.ndarray:
    """Returns the gain of light up to PEAK, by the curve of BT.2390, section 5.4."""
    peak = float(_pq_of_light(PEAK))
    code = _pq_of_light(np.maximum(light, 1e-6)) / peak
    largest = float(_pq_of_light(WHITE)) / peak
    knee = 1.5 * largest - 0.5
    t = np.clip((code - knee) / (1 - knee), 0, 1)
    curve = (
        (2 * t**3 - 3 * t**2 + 1) * knee
        + (t**3 - 2 * t**2 + t) * (1 - knee)
        + (-2 * t**3 + 3 * t**2) * largest
    )
    mapped = _light_of_pq(np.where(code < knee, code, curve) * peak)
    gain: np.ndarray = np.where(code < knee, 1, mapped / np.maximum(light, 1e-6))
    return gain
