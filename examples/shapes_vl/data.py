"""Training rows and batches: several questions about one image share one pass over the image.

A row is one sequence. Its first part is the prompt up to and with the image; after it come
branches, each a question with its answer. A branch sees the first part and itself, and its
positions go on where the first part ended, so each branch is exactly the single-turn prompt:

    ids       <bos> User: Picture 1: <image> | question 1, answer 1 | question 2, answer 2 | ...
    branch      0     0        0        0    |      1         1     |      2         2     | ...
    position    0     1      ...        p    |     p+1       ...    |     p+1       ...    | ...

No torch here, so that the process that makes the data stays small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import questions as asking
from PIL import Image
from scenes import COLOURS, KINDS, SIZES, Scene, draw_scene
from tokenizers import Tokenizer
from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import smart_resize

PATCH, MERGE = 14, 2
MIN_PIXELS, MAX_PIXELS = 112 * 112, 168 * 168
IGNORE = -100
# What can be said of one image token, see cell_targets.
CELL_CLASSES = (tuple(COLOURS), KINDS, SIZES)

OPEN, CLOSE = "<|IMAGE_START|>", "<|IMAGE_END|>"
THINK_ON, THINK_OFF = "\nAssistant: <think>", "\nAssistant: <think></think>"


@dataclass(slots=True, kw_only=True)
class Row:
    """One sequence under construction; lists are parallel, one entry for each token."""

    ids: list[int] = field(default_factory=list)
    positions: list[tuple[int, int, int]] = field(default_factory=list)
    branches: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    patches: list[np.ndarray] = field(default_factory=list)
    grids: list[tuple[int, int, int]] = field(default_factory=list)
    cells: list[np.ndarray] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows padded to one length S; `labels[b, s]` is the token that should follow position s."""

    ids: np.ndarray  # int64 [B, S]
    positions: np.ndarray  # int64 [3, B, S]
    branches: np.ndarray  # int64 [B, S], -1 at padding
    labels: np.ndarray  # int64 [B, S], IGNORE where nothing is asked
    weights: np.ndarray  # float32 [B, S]
    patches: np.ndarray  # uint8 [sum of patches, 3 * PATCH * PATCH]
    grids: np.ndarray  # int64 [images, 3]
    cells: np.ndarray  # int64 [image tokens, 3], see cell_targets
    kinds: list[list[str]]  # per row, the kind of question of branch 1, 2, ...


def preprocess(image: Image.Image) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Patches (before normalisation) and grid, exactly as ERNIE's image processor makes them."""
    height, width = smart_resize(
        image.height, image.width, PATCH * MERGE, min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS
    )
    resized = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
    rows, cols = height // PATCH, width // PATCH
    patches = resized.reshape(rows // MERGE, MERGE, PATCH, cols // MERGE, MERGE, PATCH, 3)
    patches = patches.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * cols, 3 * PATCH * PATCH)
    return patches, (1, rows, cols)


def cell_targets(scene: Scene, grid: tuple[int, int, int]) -> np.ndarray:
    """What each image token shows: int64 [tokens, 3], colour, kind and size; 0 is background."""
    rows, cols = grid[1] // MERGE, grid[2] // MERGE
    targets = np.zeros((rows, cols, len(CELL_CLASSES)), np.int64)
    ys, xs = np.mgrid[0:rows, 0:cols] + 0.5
    for shape in scene.shapes:
        x, y = shape.x / scene.width * cols, shape.y / scene.height * rows
        reach_x, reach_y = shape.radius / scene.width * cols, shape.radius / scene.height * rows
        inside = np.hypot((xs - x) / reach_x, (ys - y) / reach_y) < 0.8
        inside[min(int(y), rows - 1), min(int(x), cols - 1)] = True
        words = (shape.colour, shape.kind, shape.size)
        targets[inside] = [
            1 + names.index(word) for names, word in zip(CELL_CLASSES, words, strict=True)
        ]
    return targets.reshape(rows * cols, len(CELL_CLASSES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """How much of a row goes to short answers.

    They are few tokens among many: without a weight the captions and thoughts drown them.
    """

    questions: int = 3
    thinking: float = 1.0
    answer_weight: float = 2.0


DEFAULT_MIXTURE = Mixture()


class RowMaker:
    """Draws scenes, asks about them and writes rows; one generator of random numbers drives all."""

    def __init__(self, tokenizer: Tokenizer, rng: np.random.Generator, mixture: Mixture) -> None:
        self.tokenizer, self.mixture = tokenizer, mixture
        self.rng = rng
        self.image_id = tokenizer.token_to_id("<|IMAGE_PLACEHOLDER|>")
        self.eos_id = tokenizer.token_to_id("</s>")
        self._cache: dict[str, list[int]] = {}

    def make(self) -> Row:
        """One random row of one of the four forms."""
        draw = self.rng.random()
        if draw < 0.80:
            return self.one_image()
        if draw < 0.93:
            return self.text_first()
        if draw < 0.98:
            return self.two_images()
        return self.no_image()

    def one_image(self) -> Row:
        """The usual form: an image, then a caption, plain questions, and answers with thinking."""
        row, rng = Row(), self.rng
        image, scene = draw_scene(rng)
        start = self._text(row, self._opening() + "User: Picture 1:", 0)
        start = self._image(row, image, scene, start)
        self._branch(row, start, asking.ask_caption(rng, scene), think=False)
        for _ in range(self.mixture.questions):
            question = asking.ask(rng, scene)
            later = asking.ask(rng, scene) if rng.random() < 0.08 else None
            self._branch(row, start, question, think=False, later=later)
        if rng.random() < self.mixture.thinking:
            thought = asking.ask_caption if rng.random() < 0.25 else asking.ask
            self._branch(row, start, thought(rng, scene), think=True)
        return row

    def text_first(self) -> Row:
        """The question before the image: the image is read with the question in mind."""
        row, rng = Row(), self.rng
        image, scene = draw_scene(rng)
        question = asking.ask_caption(rng, scene) if rng.random() < 0.3 else asking.ask(rng, scene)
        start = self._text(row, f"{self._opening()}User: {question.prompt}Picture 1:", 0)
        start = self._image(row, image, scene, start)
        self._branch(row, start, question, think=bool(rng.random() < 0.4), prompt="")
        return row

    def two_images(self) -> Row:
        """Two images and questions that say which one is meant."""
        row, rng = Row(), self.rng
        start, scenes = self._text(row, self._opening() + "User: ", 0), []
        for number in (1, 2):
            image, scene = draw_scene(rng)
            start = self._text(row, f"Picture {number}:", start)
            start = self._image(row, image, scene, start)
            scenes.append(scene)
        for think in (False, False, False, True):
            number = int(rng.integers(1, 3))
            question = asking.ask_about_picture(rng, scenes[number - 1], number)
            self._branch(row, start, question, think=think)
        return row

    def no_image(self) -> Row:
        """Prompts without a picture, the odd one out."""
        row = Row()
        start = self._text(row, self._opening() + "User: ", 0)
        for think in (False, True):
            self._branch(row, start, asking.ask_no_picture(self.rng), think=think)
        return row

    def _opening(self) -> str:
        opening = "<|begin_of_sentence|>"
        if self.rng.random() < 0.06:
            opening += asking.pick(self.rng, asking.SYSTEM_PROMPTS) + "\n"
        return opening

    def _encode(self, text: str) -> list[int]:
        ids = self._cache.get(text)
        if ids is None:
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
            if len(self._cache) < 50_000:
                self._cache[text] = ids
        return ids

    def _text(self, row: Row, text: str, start: int, branch: int = 0) -> int:
        return self._ids(row, self._encode(text), start, branch)

    def _ids(self, row: Row, ids: list[int], start: int, branch: int) -> int:
        """Append text tokens from position `start` on; return the position after them."""
        row.ids += ids
        row.positions += [(start + step,) * 3 for step in range(len(ids))]
        row.branches += [branch] * len(ids)
        row.labels += [IGNORE] * len(ids)
        row.weights += [0.0] * len(ids)
        return start + len(ids)

    def _image(self, row: Row, image: Image.Image, scene: Scene, start: int) -> int:
        """Append an image with its markers; positions follow ERNIE's M-RoPE."""
        patches, grid = preprocess(image)
        start = self._text(row, OPEN, start)
        height, width = grid[1] // MERGE, grid[2] // MERGE
        count = height * width
        self._ids(row, [self.image_id] * count, start, 0)
        row.positions[-count:] = [
            (start, start + y, start + x) for y in range(height) for x in range(width)
        ]
        row.patches.append(patches)
        row.grids.append(grid)
        row.cells.append(cell_targets(scene, grid))
        return self._text(row, CLOSE, start + max(height, width))

    def _branch(
        self,
        row: Row,
        start: int,
        question: asking.Question,
        *,
        think: bool,
        later: asking.Question | None = None,
        prompt: str | None = None,
    ) -> None:
        """Append a question with its answer, and perhaps a second turn, as a branch of its own."""
        number = len(row.kinds) + 1
        asked = question.prompt if prompt is None else prompt
        start = self._turn(row, start, number, asked, question, think=think)
        if later is not None:
            self._turn(row, start, number, f"<|end_of_sentence|>\nUser: {later.prompt}", later)
        row.kinds.append(f"{question.kind}+think" if think else question.kind)

    def _turn(
        self,
        row: Row,
        start: int,
        branch: int,
        asked: str,
        question: asking.Question,
        think: bool = False,
    ) -> int:
        start = self._text(row, asked + (THINK_ON if think else THINK_OFF), start, branch)
        last = len(row.ids) - 1
        ids = self._encode(f"{question.thought}</think>") if think else []
        thought_size = len(ids)
        ids = ids + self._encode(question.answer)
        start = self._ids(row, ids, start, branch)
        row.labels[last:] = [*ids, self.eos_id]
        weight = 1.0 if question.kind == "caption" else self.mixture.answer_weight
        row.weights[last:] = [1.0] * thought_size + [weight] * (len(ids) + 1 - thought_size)
        return start


def collate(rows: list[Row], pad_id: int) -> Batch:
    """Rows padded on the right."""
    size, length = len(rows), max(len(row.ids) for row in rows)
    ids = np.full((size, length), pad_id, np.int64)
    positions = np.zeros((3, size, length), np.int64)
    branches = np.full((size, length), -1, np.int64)
    labels = np.full((size, length), IGNORE, np.int64)
    weights = np.zeros((size, length), np.float32)
    for index, row in enumerate(rows):
        used = len(row.ids)
        ids[index, :used] = row.ids
        positions[:, index, :used] = np.asarray(row.positions).T
        branches[index, :used] = row.branches
        labels[index, :used] = row.labels
        weights[index, :used] = row.weights
    return Batch(
        ids=ids,
        positions=positions,
        branches=branches,
        labels=labels,
        weights=weights,
        patches=np.concatenate([patch for row in rows for patch in row.patches]),
        cells=np.concatenate([cells for row in rows for cells in row.cells]),
        grids=np.array([grid for row in rows for grid in row.grids], np.int64),
        kinds=[row.kinds for row in rows],
    )


def batches(
    tokenizer_json: str,
    seed: int,
    batch_size: int,
    part: int = 0,
    group: int = 8,
    mixture: Mixture = DEFAULT_MIXTURE,
) -> Iterator[Batch]:
    """Endless batches; each `part` of a seed draws scenes of its own.

    `group` batches at a time are sorted by length, so that little is padding. The order in which
    they come out is the same in all parts: processes that work in step get like lengths.
    """
    tokenizer = Tokenizer.from_str(tokenizer_json)
    maker = RowMaker(tokenizer, np.random.default_rng((seed, part)), mixture)
    order = np.random.default_rng(seed)
    pad_id = tokenizer.token_to_id("<pad>")
    while True:
        rows = [maker.make() for _ in range(batch_size * group)]
        rows.sort(key=lambda row: len(row.ids))
        for index in order.permutation(group).tolist():
            yield collate(rows[index * batch_size : (index + 1) * batch_size], pad_id)
