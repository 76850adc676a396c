"""Draw clips of one moving shape and ask about them: the ground truth is its direction.

As in scenes.py everything depends only on the random generator that is passed in. A clip is
unambiguous: the shape either moves evenly along one axis by at least MIN_WAY of the side and
hardly along the other, or it does not move at all.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import av
import numpy as np
import questions as asking
from PIL import Image
from scenes import (
    COLOURS,
    KINDS,
    RADIUS,
    SIZES,
    TURN,
    Shape,
    background,
    jitter,
    paint,
    pick,
    random_size,
    round_trip,
)

RATE = 10  # frames per second
MIN_SECONDS, MAX_SECONDS = 2.0, 4.0
MIN_WAY = 0.25  # of the width or height
DRIFT = 0.15  # largest movement along the other axis, as a fraction of the way
SHARE_STILL = 0.12
STEPS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
# Fraction of the height above all shapes, because time stamps are written in the upper tenth.
TOP = 0.12

CAPTION_PROMPTS = (
    "Describe the video.",
    "Describe this video.",
    "Describe this clip.",
    "What happens in the video?",
    "What happens in this clip?",
    "What happens?",
    "What do you see?",
    "Caption this video.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """The ground truth of one clip. starts, ends: the shape in the first and in the last frame."""

    width: int
    height: int
    num_frames: int
    motion: str | None
    starts: Shape
    ends: Shape

    def at(self, index: int) -> Shape:
        """Return the shape in frame `index`."""
        share = index / max(1, self.num_frames - 1)
        x = self.starts.x + share * (self.ends.x - self.starts.x)
        y = self.starts.y + share * (self.ends.y - self.starts.y)
        return replace(self.starts, x=x, y=y)

    @property
    def caption(self) -> str:
        """The one right caption."""
        verb = f"moves {self.motion}" if self.motion else "stays still"
        return f"A {self.starts.name} {verb}."

    @property
    def thought(self) -> str:
        """The text that the model should write when it thinks."""
        verb = f"moving {self.motion}" if self.motion else "still"
        return f"I see a {self.starts.name} {verb}."


def plan_clip(rng: np.random.Generator) -> Clip:
    """Draw the ground truth of a new clip."""
    while True:
        clip = _throw(rng)
        if clip is not None:
            return clip


def _throw(rng: np.random.Generator) -> Clip | None:
    """Draw a clip whose shape stays within the frame, or None if this attempt does not."""
    # Codecs need even sides.
    width, height = (side - side % 2 for side in random_size(rng))
    size = pick(rng, SIZES)
    radius = rng.uniform(*RADIUS[size]) * math.sqrt(width * height)
    margin = radius * 1.04 + 1
    low_x, high_x = margin, width - margin
    low_y, high_y = margin + TOP * height, height - margin
    motion = None if rng.random() < SHARE_STILL else pick(rng, tuple(STEPS))
    along = width if motion in ("left", "right") else height
    way = rng.uniform(MIN_WAY, 0.7) * along if motion else 0.0
    step_x, step_y = STEPS[motion] if motion else (0, 0)
    drift = rng.uniform(-DRIFT, DRIFT) * way
    dx = step_x * way + (drift if step_x == 0 else 0)
    dy = step_y * way + (drift if step_y == 0 else 0)
    left, right = max(low_x, low_x - dx), min(high_x, high_x - dx)
    top, bottom = max(low_y, low_y - dy), min(high_y, high_y - dy)
    if left >= right or top >= bottom:
        return None
    x, y = rng.uniform(left, right), rng.uniform(top, bottom)
    shape = Shape(
        kind=pick(rng, KINDS),
        colour=pick(rng, tuple(COLOURS)),
        size=size,
        row="",
        x=x,
        y=y,
        radius=radius,
    )
    return Clip(
        width=width,
        height=height,
        num_frames=int(rng.integers(MIN_SECONDS * RATE, MAX_SECONDS * RATE + 1)),
        motion=motion,
        starts=shape,
        ends=replace(shape, x=x + dx, y=y + dy),
    )


class ClipPainter:
    """Draws the frames of one clip, with the same background, colour and rotation in all."""

    def __init__(self, rng: np.random.Generator, clip: Clip) -> None:
        self.clip = clip
        self._back = np.array(background(rng, clip.width, clip.height))
        self._colour = jitter(rng, COLOURS[clip.starts.colour], 12)
        self._turn = math.radians(rng.uniform(-1, 1) * TURN.get(clip.starts.kind, 0))
        self._has_edge = rng.random() < 0.25

    def frame(self, index: int) -> Image.Image:
        """Draw frame `index`, without compression artefacts."""
        image, shape = Image.fromarray(self._back.copy()), self.clip.at(index)
        if self._has_edge:
            edge = tuple(int(channel * 0.55) for channel in self._colour)
            paint(image, shape, edge, self._turn, 1.0)
        paint(image, shape, self._colour, self._turn, 0.86 if self._has_edge else 1.0)
        return image


def degraded(rng: np.random.Generator, frames: list[Image.Image]) -> list[Image.Image]:
    """Add compression artefacts: those of JPEG are close enough to those of video codecs."""
    if rng.random() < 0.2:
        return frames
    quality = int(rng.integers(45, 96))
    return [round_trip(frame, "JPEG", quality) for frame in frames]


def write_clip(painter: ClipPainter, path: Path) -> None:
    """Encode all frames as an H.264 file at a common quality."""
    clip = painter.clip
    with av.open(path, "w") as container:
        stream = container.add_stream("libx264", rate=RATE)
        stream.width, stream.height, stream.pix_fmt = clip.width, clip.height, "yuv420p"
        stream.options = {"crf": "23"}
        for index in range(clip.num_frames):
            container.mux(stream.encode(av.VideoFrame.from_image(painter.frame(index))))
        container.mux(stream.encode())


def ask_caption(rng: np.random.Generator, clip: Clip) -> asking.Question:
    """Make the caption task."""
    return _question("clip caption", pick(rng, CAPTION_PROMPTS), clip.caption, clip)


def ask(rng: np.random.Generator, clip: Clip) -> asking.Question:
    """Make a question with one right answer."""
    shape = clip.starts
    name = pick(rng, (shape.kind, f"{shape.colour} {shape.kind}", "shape"))
    asked = pick(rng, ("way", "what", "colour", "does"))
    if asked == "way":
        prompt = pick(rng, (f"Which way does the {name} move?", f"Where does the {name} move?"))
        return _question("clip way", prompt, clip.motion or "still", clip)
    if asked == "what":
        prompt = pick(rng, ("What do you see in the video?", "Which shape is in the video?"))
        return _question("clip what", prompt, f"a {shape.name}", clip)
    if asked == "colour":
        return _question("clip colour", f"What color is the {shape.kind}?", shape.colour, clip)
    way = clip.motion if clip.motion and rng.random() < 0.5 else pick(rng, tuple(STEPS))
    answer = asking.yes_no(way == clip.motion)
    return _question("clip does", f"Does the {name} move {way}?", answer, clip)


def _question(kind: str, prompt: str, answer: str, clip: Clip) -> asking.Question:
    return asking.Question(kind=kind, prompt=prompt, thought=clip.thought, answer=answer)


def main() -> None:
    """Draws clips into files: python clips.py SEED=FILE ..."""
    for argument in sys.argv[1:]:
        number, _, path = argument.partition("=")
        rng = np.random.default_rng(int(number))
        clip = plan_clip(rng)
        write_clip(ClipPainter(rng, clip), Path(path))
        print(f"{path}: {clip.caption}")


if __name__ == "__main__":
    main()
