"""Draw scenes of simple shapes with their ground truth: kind, position, colour and size of each.

Everything depends only on the `numpy.random.Generator` that is passed in: the same seed gives the
same scenes and the same pixels (with the same Pillow). Imports no torch.

A scene is unambiguous by construction, so that each question about it has one right answer:

    x   centres differ by at least X_GAP of sqrt(area)   -> "left of" is never a close call
    y   centres lie in one of three bands, with gaps     -> "top", "middle", "bottom", "above"
    r   small or large, with nothing in between          -> size is never a close call
    no two shapes touch, and colours are easy to tell apart on a background of greys
"""

from __future__ import annotations

import functools
import io
import math
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 32, 36),
    "orange": (250, 140, 20),
    "yellow": (246, 222, 40),
    "green": (38, 160, 58),
    "cyan": (40, 205, 220),
    "blue": (40, 70, 215),
    "purple": (135, 45, 175),
    "pink": (250, 130, 190),
}
KINDS = ("circle", "square", "triangle", "star", "diamond", "cross", "ring", "heart")
ROWS = ("top", "middle", "bottom")
SIZES = ("small", "large")

MAX_SHAPES = 4
MIN_SIDE, MAX_SIDE = 96, 448
X_GAP = 0.09
ROW_BANDS = {"top": (0.0, 0.30), "middle": (0.44, 0.56), "bottom": (0.70, 1.0)}
# Radius in units of sqrt(image area).
RADIUS = {"small": (0.095, 0.115), "large": (0.165, 0.190)}
# How far a shape may be rotated, in degrees, and still be recognised as its kind.
TURN = {"square": 10, "triangle": 12, "star": 36, "diamond": 7, "cross": 10, "heart": 14}
SUPERSAMPLE = 3
NOISE_SIZE = 4 * MAX_SIDE * MAX_SIDE


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A shape: its size, colour and kind as words, its centre and radius in pixels."""

    kind: str
    colour: str
    size: str
    row: str
    x: float
    y: float
    radius: float

    @property
    def name(self) -> str:
        """The words for it in a caption: "small red circle"."""
        return f"{self.size} {self.colour} {self.kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The ground truth of one image; `shapes` are sorted from left to right."""

    width: int
    height: int
    shapes: tuple[Shape, ...]


def pick(rng: np.random.Generator, options: tuple | list):  # type: ignore[type-arg]
    """Choose one of `options` uniformly (cheaper than `rng.choice`)."""
    return options[int(rng.integers(len(options)))]


def caption(scene: Scene) -> str:
    """Return the one right caption of a scene."""
    shapes = scene.shapes
    if len(shapes) == 1:
        return f"A {shapes[0].name}."
    if len(shapes) == 2:
        upper, lower = sorted(shapes, key=lambda shape: ROWS.index(shape.row))
        word = "left of" if upper.row == lower.row else "above"
        return f"A {upper.name} {word} a {lower.name}."
    names = [f"a {shape.name}" for shape in shapes]
    return f"From left to right: {', '.join(names[:-1])} and {names[-1]}."


def inventory(scene: Scene) -> str:
    """Return the model's text when it thinks: each shape with its row, from left to right."""
    where = {"top": "at the top", "middle": "in the middle", "bottom": "at the bottom"}
    items = [f"a {shape.name} {where[shape.row]}" for shape in scene.shapes]
    return f"I see {', '.join(items)}."


def draw_scene(
    rng: np.random.Generator, num_shapes: int | None = None, size: tuple[int, int] | None = None
) -> tuple[Image.Image, Scene]:
    """Draw a new RGB image and its ground truth. size: (width, height), random if None."""
    width, height = size or random_size(rng)
    count = num_shapes or int(rng.integers(1, MAX_SHAPES + 1))
    shapes = None
    while shapes is None:
        shapes = _place(rng, count, width, height)
    scene = Scene(width=width, height=height, shapes=shapes)
    return _degrade(rng, _render(rng, scene)), scene


def random_size(rng: np.random.Generator) -> tuple[int, int]:
    """Draw (width, height), both in MIN_SIDE..MAX_SIDE, with an aspect of at most 2."""
    aspect = pick(rng, (1.0, 1.0, 4 / 3, 3 / 2, 16 / 9, 2.0))
    # Log-uniform, so that small images, which are the hard ones, are frequent.
    low, high = MIN_SIDE, MAX_SIDE / aspect
    short = math.exp(rng.uniform(math.log(low), math.log(high)))
    sides = (round(short), min(MAX_SIDE, round(short * aspect)))
    return sides if rng.random() < 0.5 else sides[::-1]


# ---------------------------------------------------------------------------- placement


def _place(
    rng: np.random.Generator, count: int, width: int, height: int
) -> tuple[Shape, ...] | None:
    """Draw `count` shapes that keep the rules in the header, or None if this attempt fails."""
    scale = math.sqrt(width * height)
    shapes: list[Shape] = []
    for _ in range(count):
        kind, colour = _kind_and_colour(rng, shapes)
        size = pick(rng, SIZES)
        radius = rng.uniform(*RADIUS[size]) * scale
        shape = None
        for _ in range(12):
            shape = _throw(rng, kind, colour, size, radius, width, height)
            if all(_apart(shape, other, scale) for other in shapes):
                break
            shape = None
        if shape is None:
            return None
        shapes.append(shape)
    return tuple(sorted(shapes, key=lambda shape: shape.x))


def _kind_and_colour(rng: np.random.Generator, shapes: list[Shape]) -> tuple[str, str]:
    """Sometimes repeat the kind or colour of an earlier shape: else all counts would be 0 or 1."""
    kind, colour = pick(rng, KINDS), pick(rng, tuple(COLOURS))
    if shapes:
        reuse = rng.random()
        if reuse < 0.25:
            kind = pick(rng, shapes).kind
        elif reuse < 0.5:
            colour = pick(rng, shapes).colour
    return kind, colour


def _throw(
    rng: np.random.Generator,
    kind: str,
    colour: str,
    size: str,
    radius: float,
    width: int,
    height: int,
) -> Shape:
    """Draw a shape at a random position within one of the rows and within the image."""
    margin = radius * 1.04 + 1
    row = pick(rng, ROWS)
    low, high = ROW_BANDS[row]
    y = rng.uniform(max(low * height, margin), min(high * height, height - margin))
    x = rng.uniform(margin, width - margin)
    return Shape(kind=kind, colour=colour, size=size, row=row, x=x, y=y, radius=radius)


def _apart(one: Shape, other: Shape, scale: float) -> bool:
    distance = math.hypot(one.x - other.x, one.y - other.y)
    clear = distance >= (one.radius + other.radius) * 1.06 + 0.01 * scale
    return clear and abs(one.x - other.x) >= X_GAP * scale


# ---------------------------------------------------------------------------- drawing


def _render(rng: np.random.Generator, scene: Scene) -> Image.Image:
    image = Image.fromarray(background(rng, scene.width, scene.height))
    for shape in scene.shapes:
        colour = jitter(rng, COLOURS[shape.colour], 12)
        turn = math.radians(rng.uniform(-1, 1) * TURN.get(shape.kind, 0))
        if rng.random() < 0.25:
            edge = tuple(int(channel * 0.55) for channel in colour)
            paint(image, shape, edge, turn, 1.0)
            paint(image, shape, colour, turn, 0.86)
        else:
            paint(image, shape, colour, turn, 1.0)
    return image


def jitter(
    rng: np.random.Generator, colour: tuple[int, int, int], amount: int
) -> tuple[int, int, int]:
    shifted = np.asarray(colour) + rng.integers(-amount, amount + 1, 3)
    red, green, blue = np.clip(shifted, 0, 255).tolist()
    return red, green, blue


def paint(
    image: Image.Image, shape: Shape, colour: tuple[int, ...], turn: float, factor: float
) -> None:
    """Draw one shape, antialiased: a mask SUPERSAMPLE times as large, averaged down."""
    reach = math.ceil(shape.radius * 1.05) + 1
    left, top = math.floor(shape.x) - reach, math.floor(shape.y) - reach
    side = (2 * reach + 1) * SUPERSAMPLE
    mask = Image.new("L", (side, side))
    centre = ((shape.x - left) * SUPERSAMPLE, (shape.y - top) * SUPERSAMPLE)
    _fill(ImageDraw.Draw(mask), shape.kind, centre, shape.radius * SUPERSAMPLE * factor, turn)
    small = mask.reduce(SUPERSAMPLE)
    image.paste(colour, (left, top, left + small.width, top + small.height), small)


def _fill(
    draw: ImageDraw.ImageDraw, kind: str, centre: tuple[float, float], radius: float, turn: float
) -> None:
    x, y = centre
    if kind in ("circle", "ring"):
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=255)
        if kind == "ring":
            hole = radius * 0.55
            draw.ellipse((x - hole, y - hole, x + hole, y + hole), fill=0)
        return
    points = OUTLINES[kind] * radius
    cos, sin = math.cos(turn), math.sin(turn)
    turned = points @ np.array([[cos, sin], [-sin, cos]]) + np.array(centre)
    draw.polygon([tuple(point) for point in turned.tolist()], fill=255)


def _star() -> list[tuple[float, float]]:
    angles = [math.pi * step / 5 - math.pi / 2 for step in range(10)]
    reach = [1.0 if step % 2 == 0 else 0.42 for step in range(10)]
    return [(r * math.cos(a), r * math.sin(a)) for r, a in zip(reach, angles, strict=True)]


def _cross(half: float = 0.3, arm: float = 0.95) -> list[tuple[float, float]]:
    corner = [(half, arm), (half, half), (arm, half)]
    quarter = [*corner, *((x, -y) for x, y in reversed(corner))]
    return [*quarter, *((-x, -y) for x, y in quarter)]


def _heart() -> list[tuple[float, float]]:
    steps = [2 * math.pi * step / 36 for step in range(36)]
    xs = [math.sin(t) ** 3 for t in steps]
    ys = [
        -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) / 16
        for t in steps
    ]
    return [(x * 0.98, y * 0.98 - 0.08) for x, y in zip(xs, ys, strict=True)]


# Outlines around the origin, within the unit circle or nearly so; y grows downwards.
OUTLINES: dict[str, np.ndarray] = {
    "square": np.array([(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)]),
    "triangle": np.array([(0, -0.95), (0.95, 0.75), (-0.95, 0.75)]),
    "star": np.array(_star()),
    # Taller than wide, so that no rotated square looks like a diamond.
    "diamond": np.array([(0, -1.0), (0.68, 0), (0, 1.0), (-0.68, 0)]),
    "cross": np.array(_cross()),
    "heart": np.array(_heart()),
}


def background(rng: np.random.Generator, width: int, height: int) -> np.ndarray:
    """Draw slightly tinted greys, plain or patterned: uint8 [height, width, 3]."""
    first = rng.uniform(25, 245) + rng.uniform(-9, 9, 3)
    style = pick(rng, ("plain", "plain", "gradient", "stripes", "checks", "texture"))
    if style == "plain":
        return np.broadcast_to(np.clip(first, 0, 255).astype(np.uint8), (height, width, 3))
    if style == "gradient":
        weight = _ramp(rng, width, height)
    elif style == "texture":
        coarse = rng.random((max(2, height // 24), max(2, width // 24)), dtype=np.float32)
        smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        weight = np.asarray(smooth)
    else:
        weight = _tiles(rng, width, height, both=style == "checks")
    span = 60 if style == "gradient" else 26
    second = first + rng.uniform(-span, span) + rng.uniform(-5, 5, 3)
    colours = first + weight[..., None] * (second - first).astype(np.float32)
    return np.clip(colours, 0, 255).astype(np.uint8)


def _ramp(rng: np.random.Generator, width: int, height: int) -> np.ndarray:
    angle = rng.uniform(0, 2 * math.pi)
    xs = np.linspace(-0.5, 0.5, width, dtype=np.float32) * math.cos(angle)
    ys = np.linspace(-0.5, 0.5, height, dtype=np.float32) * math.sin(angle)
    return xs[None, :] + ys[:, None] + 0.5


def _tiles(rng: np.random.Generator, width: int, height: int, *, both: bool) -> np.ndarray:
    period = max(4, round(math.sqrt(width * height) * rng.uniform(0.04, 0.15)))
    xs, ys = np.arange(width) // period, np.arange(height) // period
    if both:
        return ((xs[None, :] + ys[:, None]) % 2).astype(np.float32)
    if rng.random() < 0.5:
        return np.broadcast_to((xs % 2).astype(np.float32)[None, :], (height, width))
    return np.broadcast_to((ys % 2).astype(np.float32)[:, None], (height, width))


# ---------------------------------------------------------------------------- degradation


def _degrade(rng: np.random.Generator, image: Image.Image) -> Image.Image:
    """Add sensor noise to most images, then recompress most as JPEG or WebP."""
    if rng.random() < 0.6:
        pixels = np.asarray(image).astype(np.float32)
        start = int(rng.integers(NOISE_SIZE - pixels.size))
        noise = _noise()[start : start + pixels.size].reshape(pixels.shape)
        pixels += noise * np.float32(rng.uniform(1, 9))
        image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    draw = rng.random()
    if draw < 0.7:
        return round_trip(image, "JPEG", int(rng.integers(40, 96)))
    if draw < 0.75:
        return round_trip(image, "WEBP", int(rng.integers(50, 96)))
    return image


@functools.cache
def _noise() -> np.ndarray:
    """Take noise from one long precomputed strip: new noise would take half of the time."""
    return np.random.default_rng(0).standard_normal(NOISE_SIZE, dtype=np.float32)


def round_trip(image: Image.Image, kind: str, quality: int) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, kind, quality=quality)
    return Image.open(io.BytesIO(buffer.getvalue())).convert("RGB")
