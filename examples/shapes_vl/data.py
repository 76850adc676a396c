"""Training rows and batches: several questions about one image share one pass over the image.

A row is one sequence. It begins with a prefix, the prompt up to and including the image. Branches
follow, each a question with its answer. A branch attends to the prefix and to itself, and its
positions continue after the prefix, so each branch is exactly the single-turn prompt:

    ids       <bos> User: Picture 1: <image> | question 1, answer 1 | question 2, answer 2 | ...
    branch      0     0        0        0    |      1         1     |      2         2     | ...
    position    0     1      ...        p    |     p+1       ...    |     p+1       ...    | ...

Imports no torch, so that the process that makes the data stays small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import clips
import numpy as np
import questions as asking
from mmdeploy_llm_plugins.ernie.frames import choose_frames
from mmdeploy_llm_plugins.ernie.video import Stamp
from PIL import Image
from pixels import MERGE, PAIR, VIDEO, preprocess
from scenes import Scene, draw_scene
from targets import IGNORE, MENTION, MENTION_CLASSES, cell_targets, clip_cells, mention_targets
from tokenizers import Tokenizer

from mmdeploy_llm.media.video.timeline import constant_timeline

OPEN, CLOSE = "<|IMAGE_START|>", "<|IMAGE_END|>"
OPEN_VIDEO, CLOSE_VIDEO = "<|VIDEO_START|>", "<|VIDEO_END|>"
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
    mentions: list[tuple[int, ...]] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows padded to one length S; `labels[b, s]` is the token that should follow position s."""

    ids: np.ndarray  # int64 [B, S]
    positions: np.ndarray  # int64 [3, B, S]
    branches: np.ndarray  # int64 [B, S], -1 at padding
    labels: np.ndarray  # int64 [B, S], IGNORE where no token is predicted
    weights: np.ndarray  # float32 [B, S]
    patches: np.ndarray  # uint8 [sum of patches, 3 * PATCH * PATCH]
    grids: np.ndarray  # int64 [images and clips, 3]
    cells: np.ndarray  # int64 [image tokens, 5], see cell_targets
    mentions: np.ndarray  # int64 [mentions, 2 + 6]: row, position, see mention_targets
    kinds: list[list[str]]  # per row, the kind of question of branch 1, 2, ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The shares of tasks in the rows, and the weight of short answers.

    Short answers have few tokens: without a weight, captions and thoughts dominate the loss.
    """

    questions: int = 5
    thinking: float = 0.7
    clips: float = 0.15  # share of rows with a clip instead of an image
    answer_weight: float = 2.0


DEFAULT_MIXTURE = Mixture()


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Tokenize a text and find the shapes it names: (last token, (size, colour, kind))."""

    ids: list[int]
    mentions: list[tuple[int, tuple[str | None, ...]]]


class RowMaker:
    """Draws scenes, asks about them and writes rows, all from one random generator."""

    def __init__(self, tokenizer: Tokenizer, rng: np.random.Generator, mixture: Mixture) -> None:
        self.tokenizer, self.mixture = tokenizer, mixture
        self.rng = rng
        self.image_id = tokenizer.token_to_id("<|IMAGE_PLACEHOLDER|>")
        self.video_id = tokenizer.token_to_id("<|VIDEO_PLACEHOLDER|>")
        self.stamp = Stamp(Path(__file__).parent, VIDEO.font)
        self.eos_id = tokenizer.token_to_id("</s>")
        self._cache: dict[str, Encoded] = {}

    def make(self) -> Row:
        """Make a random row of one of the five forms."""
        if self.rng.random() < self.mixture.clips:
            return self.clip()
        draw = self.rng.random()
        if draw < 0.80:
            return self.one_image()
        if draw < 0.93:
            return self.text_first()
        if draw < 0.98:
            return self.two_images()
        return self.no_image()

    def one_image(self) -> Row:
        """Make a row of the usual form: image, caption, questions, and answers with thinking."""
        row, rng = Row(), self.rng
        image, scene = draw_scene(rng)
        start = self._text(row, self._opening() + "User: Picture 1:", 0)
        start = self._image(row, image, scene, start)
        self._branch(row, start, asking.ask_caption(rng, scene), scene, think=False)
        for _ in range(self.mixture.questions):
            question = asking.ask(rng, scene)
            later = asking.ask(rng, scene) if rng.random() < 0.08 else None
            self._branch(row, start, question, scene, think=False, later=later)
        if rng.random() < self.mixture.thinking:
            thought = asking.ask_caption if rng.random() < 0.25 else asking.ask
            self._branch(row, start, thought(rng, scene), scene, think=True)
        return row

    def text_first(self) -> Row:
        """Make a row with the question before the image, so that image tokens attend to it."""
        row, rng = Row(), self.rng
        image, scene = draw_scene(rng)
        question = asking.ask_caption(rng, scene) if rng.random() < 0.3 else asking.ask(rng, scene)
        start = self._text(row, f"{self._opening()}User: {question.prompt}Picture 1:", 0)
        start = self._image(row, image, scene, start)
        self._branch(row, start, question, scene, think=bool(rng.random() < 0.4), prompt="")
        return row

    def two_images(self) -> Row:
        """Make a row of two images and questions that say which one they mean."""
        row, rng = Row(), self.rng
        start, scenes = self._text(row, self._opening() + "User: ", 0), []
        for number in (1, 2):
            image, scene = draw_scene(rng)
            start = self._text(row, f"Picture {number}:", start)
            start = self._image(row, image, scene, start)
            scenes.append(scene)
        for think in (False, False, False, True):
            number = int(rng.integers(1, 3))
            scene = scenes[number - 1]
            question = asking.ask_about_picture(rng, scene, number)
            self._branch(row, start, question, scene, think=think)
        return row

    def clip(self) -> Row:
        """Make a row of a clip, its caption and questions, one of them with thinking."""
        row, rng = Row(), self.rng
        clip = clips.plan_clip(rng)
        start = self._text(row, self._opening() + "User: Video 1:", 0)
        start = self._video(row, clip, start)
        self._branch(row, start, clips.ask_caption(rng, clip), None, think=False)
        for _ in range(2):
            self._branch(row, start, clips.ask(rng, clip), None, think=False)
        thought = clips.ask_caption if rng.random() < 0.5 else clips.ask
        self._branch(row, start, thought(rng, clip), None, think=True)
        return row

    def no_image(self) -> Row:
        """Make a row of prompts without a picture."""
        row = Row()
        start = self._text(row, self._opening() + "User: ", 0)
        for think in (False, True):
            self._branch(row, start, asking.ask_no_picture(self.rng), None, think=think)
        return row

    def _opening(self) -> str:
        opening = "<|begin_of_sentence|>"
        if self.rng.random() < 0.06:
            opening += asking.pick(self.rng, asking.SYSTEM_PROMPTS) + "\n"
        return opening

    def _encode(self, text: str) -> Encoded:
        found = self._cache.get(text)
        if found is None:
            encoding = self.tokenizer.encode(text, add_special_tokens=False)
            ends = [end for _, end in encoding.offsets]
            mentions = [
                (ends.index(match.end()), (match[1], match[2] or match[4], match[3]))
                for match in MENTION.finditer(text)
                if match.end() in ends
            ]
            found = Encoded(ids=encoding.ids, mentions=mentions)
            if len(self._cache) < 50_000:
                self._cache[text] = found
        return found

    def _text(
        self, row: Row, text: str, start: int, branch: int = 0, scene: Scene | None = None
    ) -> int:
        encoded = self._encode(text)
        if scene is not None:
            row.mentions += [
                (len(row.ids) + index, *mention_targets(scene, words))
                for index, words in encoded.mentions
            ]
        return self._ids(row, encoded.ids, start, branch)

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

    def _video(self, row: Row, clip: clips.Clip, start: int) -> int:
        """Append the frames that the video processor would choose, with its time stamps."""
        timeline = constant_timeline(clip.width, clip.height, clip.num_frames, clips.RATE)
        chosen = choose_frames(timeline, VIDEO, "0" * 16)
        chosen += chosen[-1:] * (len(chosen) % PAIR)
        painter = clips.ClipPainter(self.rng, clip)
        frames = clips.degraded(self.rng, [painter.frame(index) for index in chosen])
        made = [
            preprocess(self.stamp.draw(frame, timeline.time_of(index)))
            for frame, index in zip(frames, chosen, strict=True)
        ]
        _, rows, cols = made[0][1]
        start = self._text(row, OPEN_VIDEO, start)
        height, width, steps = rows // MERGE, cols // MERGE, len(chosen) // PAIR
        count = steps * height * width
        self._ids(row, [self.video_id] * count, start, 0)
        row.positions[-count:] = [
            (start + step, start + y, start + x)
            for step in range(steps)
            for y in range(height)
            for x in range(width)
        ]
        row.patches += [patches for patches, _ in made]
        row.grids.append((len(chosen), rows, cols))
        for step in range(steps):
            pair = [clip.at(index) for index in chosen[PAIR * step : PAIR * (step + 1)]]
            row.cells.append(clip_cells(clip, pair, (1, rows, cols)))
        return self._text(row, CLOSE_VIDEO, start + max(height, width))

    def _branch(
        self,
        row: Row,
        start: int,
        question: asking.Question,
        scene: Scene | None,
        *,
        think: bool,
        later: asking.Question | None = None,
        prompt: str | None = None,
    ) -> None:
        """Append a question with its answer, and sometimes a second turn, as a new branch."""
        number = len(row.kinds) + 1
        asked = question.prompt if prompt is None else prompt
        start = self._turn(row, start, number, asked, question, scene, think=think)
        if later is not None:
            asked = f"<|end_of_sentence|>\nUser: {later.prompt}"
            self._turn(row, start, number, asked, later, scene)
        row.kinds.append(f"{question.kind}+think" if think else question.kind)

    def _turn(
        self,
        row: Row,
        start: int,
        branch: int,
        asked: str,
        question: asking.Question,
        scene: Scene | None,
        think: bool = False,
    ) -> int:
        asked += THINK_ON if think else THINK_OFF
        start = self._text(row, asked, start, branch, scene)
        last = len(row.ids) - 1
        if think:
            start = self._text(row, f"{question.thought}</think>", start, branch, scene)
        said = len(row.ids)
        start = self._text(row, question.answer, start, branch, scene)
        row.labels[last:] = [*row.ids[last + 1 :], self.eos_id]
        weight = 1.0 if question.kind == "caption" else self.mixture.answer_weight
        row.weights[last:] = [1.0] * (said - last - 1) + [weight] * (len(row.ids) + 1 - said)
        return start


def collate(rows: list[Row], pad_id: int) -> Batch:
    """Pad rows on the right and stack them."""
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
        mentions=np.array(
            [(index, *mention) for index, row in enumerate(rows) for mention in row.mentions],
            np.int64,
        ).reshape(-1, 2 + len(MENTION_CLASSES)),
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
    """Yield endless batches; each `part` of a seed draws different scenes.

    Rows are sorted by length within every `group` batches, which saves padding. The order of the
    batches is the same in all parts, so that processes in lockstep get similar lengths.
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
