"""The workloads. The same seed yields the same requests on any machine.

text    prompts of varying length as token ids, answers of varying length
vl      an image of 448 x 448 pixels and a question per request
photo   like vl with JPEG files of 12 megapixels, so that reading, decoding and resizing count
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .photos import smooth_pixels, write_photo

WorkName = Literal["text", "vl", "photo"]

QUESTION = "Describe this image in detail."
IMAGE_SIZE = 448  # pixels per side
PROMPT_TOKENS = (64, 192)
OUTPUT_TOKENS = (32, 96)
ANSWER_TOKENS = 64  # length of an answer about an image
ALONE_TOKENS = 128  # length of the prompt, and of the answer, of a request that runs alone
LOWEST_ID, HIGHEST_ID = 20, 15_000  # ids below 20 are mostly special tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """A prompt in a form that LLM accepts, and the number of tokens to generate."""

    prompt: Any
    num_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Makes the requests of a workload.

    vocab_size: size of the model's vocabulary.
    folder: where photos are written.
    special_ids: token ids that no prompt may contain.
    """

    name: WorkName
    num_requests: int
    vocab_size: int
    folder: Path
    special_ids: Collection[int] = field(default=frozenset())

    @property
    def num_images(self) -> int:
        """Images in one round."""
        return 0 if self.name == "text" else self.num_requests

    def round(self, seed: int) -> list[BenchRequest]:
        """Returns the requests of a round, all different from those of other seeds."""
        if self.name == "text":
            return list(self._texts(seed))
        return [self._about_image(self._image(seed, i)) for i in range(self.num_requests)]

    def alone(self, seed: int) -> BenchRequest:
        """Returns one request that is to run alone."""
        if self.name == "text":
            ids = self._ids(random.Random(f"alone {seed}"), ALONE_TOKENS)
            return BenchRequest(prompt=ids, num_output_tokens=ALONE_TOKENS)
        return self._about_image(self._image(seed, 0))

    def _texts(self, seed: int) -> Iterator[BenchRequest]:
        rng = random.Random(seed)
        for _ in range(self.num_requests):
            ids = self._ids(rng, rng.randint(*PROMPT_TOKENS))
            yield BenchRequest(prompt=ids, num_output_tokens=rng.randint(*OUTPUT_TOKENS))

    def _ids(self, rng: random.Random, count: int) -> list[int]:
        usable = self._usable_ids()
        return [rng.choice(usable) for _ in range(count)]

    def _usable_ids(self) -> Sequence[int]:
        highest = min(HIGHEST_ID, self.vocab_size)
        lowest = min(LOWEST_ID, highest // 2)
        return [token for token in range(lowest, highest) if token not in self.special_ids]

    def _image(self, seed: int, number: int) -> Any:
        rng = np.random.default_rng((seed, number))
        if self.name == "vl":
            return smooth_pixels(rng, IMAGE_SIZE, IMAGE_SIZE)
        return str(write_photo(rng, self.folder / f"{seed}-{number}.jpg"))

    def _about_image(self, image: Any) -> BenchRequest:
        parts = [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]
        prompt = {"messages": [{"role": "user", "content": parts}]}
        return BenchRequest(prompt=prompt, num_output_tokens=ANSWER_TOKENS)
