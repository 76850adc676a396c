"""Writes JPEG files as cameras and phones do: `camera.py FOLDER [--num 200] [--width 4000]
[--height 3000]`.

A scene has shapes at every scale. Noise grows with the light, as a sensor's does, and is smooth
over neighbours, as demosaicing leaves it; at quality 95 a file of 12 megapixels has about 3 MB.
EXIF says camera, time, exposure and how the camera was held: of ten pictures three are upright only
after a quarter turn to the right, one after one to the left and one after half a turn. Files that
are there already are kept. Imports no engine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 4000, 3000
QUALITY = 95
SCALES = ((512, 60), (128, 30), (32, 14), (8, 6))  # pixels of a cell, and its contrast
READ_NOISE, SHOT_NOISE = 1.5, 0.045  # levels of 255, and variance for each level of light
HELD = (1, 6, 1, 1, 6, 8, 1, 6, 3, 1)  # EXIF orientations of ten pictures that follow each other
EXIF_DIRECTORY = 0x8769
ORIENTATION = 0x0112


def scene(rng: np.random.Generator, width: int, height: int) -> np.ndarray:
    """Returns float32 [height, width, 3] of 0..255 without noise."""
    pixels = np.full((height, width, 3), 128, dtype=np.float32)
    for cell, contrast in SCALES:
        shape = (height // cell + 2, width // cell + 2, 3)
        coarse = Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8))
        layer = coarse.resize((width, height), Image.Resampling.BICUBIC)
        pixels += (np.asarray(layer, dtype=np.float32) / 127.5 - 1) * contrast
    return pixels.clip(0, 255, out=pixels)


def exposed(rng: np.random.Generator, light: np.ndarray) -> Image.Image:
    """Returns the scene as a sensor sees it."""
    noise = rng.standard_normal(light.shape, dtype=np.float32)
    noise[:, 1:] = 0.7 * (noise[:, 1:] + noise[:, :-1])  # of a pixel and its neighbour
    noise *= np.sqrt(READ_NOISE**2 + SHOT_NOISE * light)
    noise += light
    return Image.fromarray(noise.clip(0, 255, out=noise).astype(np.uint8))


def exif_of(number: int) -> Image.Exif:
    """Returns what a camera writes beside the picture."""
    exif = Image.Exif()
    minute, second = divmod(number, 60)
    exif[0x010F], exif[0x0110] = "Acme", "Pocket 12"
    exif[ORIENTATION] = HELD[number % len(HELD)]
    exif[0x0132] = f"2026:06:01 12:{minute % 60:02d}:{second:02d}"
    inner = exif.get_ifd(EXIF_DIRECTORY)
    inner[0x829A], inner[0x829D], inner[0x8827] = 1 / 120, 1.8, 200  # seconds, aperture, ISO
    inner[0x920A] = 5.7  # focal length
    return exif


def write_photos(folder: Path, num: int, width: int = WIDTH, height: int = HEIGHT) -> list[Path]:
    """Writes the files that are missing; returns all paths, which are the same for each call."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"photo-{width}x{height}-{number:04d}.jpg" for number in range(num)]
    for number, path in enumerate(paths):
        if path.exists():
            continue
        rng = np.random.default_rng((number, width, height))
        part = path.with_suffix(".part")
        image = exposed(rng, scene(rng, width, height))
        image.save(part, "JPEG", quality=QUALITY, exif=exif_of(number))
        part.rename(path)
    return paths


def main() -> None:
    """Writes the files and says how large they are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num", type=int, default=200)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--height", type=int, default=HEIGHT)
    args = parser.parse_args()
    paths = write_photos(args.folder, args.num, args.width, args.height)
    sizes = [path.stat().st_size / 1e6 for path in paths]
    print(f"{len(paths)} files of {min(sizes):.1f} to {max(sizes):.1f} MB in {args.folder}")


if __name__ == "__main__":
    main()
