"""Draws the pictures in examples/images, which `make demo` captions: `python make_demo_images.py`.

The scenes come from the generator that the bundled model was trained with, with other seeds.
Formats, sizes and aspect ratios differ; one file is rotated by its EXIF tag, one has a palette, and
the last is truncated, to show what happens to a corrupt file. The clips beside them come from
`python shapes_vl/clips.py 9000011=images/clip-1.mp4 9000003=images/clip-2.mp4`.
"""

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from shapes_vl.scenes import caption, draw_scene

FOLDER = Path(__file__).parent / "images"
ORIENTATION = 0x0112  # the EXIF tag; 6: rotate clockwise by 90 degrees to see it upright


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """One picture to draw. size: (width, height) as displayed."""

    name: str
    seed: int
    num_shapes: int
    size: tuple[int, int]
    is_rotated: bool = False
    has_palette: bool = False


DEMOS = (
    Demo(name="picture-1.png", seed=101, num_shapes=1, size=(224, 224)),
    Demo(name="picture-2.jpg", seed=102, num_shapes=2, size=(448, 252)),
    Demo(name="picture-3.webp", seed=103, num_shapes=3, size=(400, 300)),
    Demo(name="picture-4.jpg", seed=104, num_shapes=2, size=(240, 360), is_rotated=True),
    Demo(name="picture-5.png", seed=105, num_shapes=4, size=(440, 220)),
    Demo(name="picture-6.jpg", seed=106, num_shapes=1, size=(128, 192)),
    Demo(name="picture-7.webp", seed=107, num_shapes=2, size=(160, 160)),
    Demo(name="picture-8.png", seed=108, num_shapes=3, size=(300, 300), has_palette=True),
    Demo(name="picture-9.jpg", seed=109, num_shapes=4, size=(448, 336)),
    Demo(name="picture-10.png", seed=110, num_shapes=2, size=(200, 300)),
)
TRUNCATED = "truncated-on-purpose.jpg"


def encode(demo: Demo, image: Image.Image) -> bytes:
    """Returns the bytes of the file, in the format of its name."""
    if demo.has_palette:
        image = image.quantize(128)
    exif = Image.Exif()
    if demo.is_rotated:
        image = image.transpose(Image.Transpose.ROTATE_90)
        exif[ORIENTATION] = 6
    buffer = io.BytesIO()
    match Path(demo.name).suffix:
        case ".png":
            image.save(buffer, "PNG", optimize=True)
        case ".jpg":
            image.save(buffer, "JPEG", quality=88, exif=exif)
        case ".webp":
            image.save(buffer, "WEBP", quality=88)
    return buffer.getvalue()


def main() -> None:
    """Draws all pictures and prints what is on them."""
    FOLDER.mkdir(exist_ok=True)
    for demo in DEMOS:
        rng = np.random.default_rng(demo.seed)
        image, scene = draw_scene(rng, demo.num_shapes, demo.size)
        blob = encode(demo, image)
        (FOLDER / demo.name).write_bytes(blob)
        print(f"{demo.name}: {len(blob) / 1024:.0f} KB, {caption(scene)}")
    whole = (FOLDER / "picture-9.jpg").read_bytes()
    (FOLDER / TRUNCATED).write_bytes(whole[: len(whole) // 3])


if __name__ == "__main__":
    main()
