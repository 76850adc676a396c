"""The workloads that all engines run: token-id prompts of varying length with fixed output lengths,
and images with a question. Imports no engine, so that any environment can use it."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from PIL import Image

QUESTION = "Describe this image in detail."
IMAGE_MARKS = {"gemma4": "<|image|>"}  # by the type of the model; others have Qwen's
QWEN_MARK = "<|vision_start|><|image_pad|><|vision_end|>"
IMAGE_SIZE = 448  # pixels per side; 256 tokens for Qwen2.5-VL
ANSWER_TOKENS = 64  # length of an answer about an image
ALONE_TOKENS = 128  # prompt length of a request that runs alone
FIRST_TOKENS = 1024  # prompt length of a request whose first token is timed


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """A prompt as token ids, and the number of tokens to generate."""

    token_ids: list[int]
    num_output_tokens: int


def text(num_requests: int = 32, vocab_size: int = 15000, seed: int = 0) -> list[TextRequest]:
    """Returns prompts of 64-192 tokens with 32-96 output tokens each; by default 4,197 tokens in
    and 1,997 out."""
    rng = random.Random(seed)
    requests = []
    for _ in range(num_requests):
        ids = [rng.randrange(20, vocab_size) for _ in range(rng.randint(64, 192))]
        requests.append(TextRequest(token_ids=ids, num_output_tokens=rng.randint(32, 96)))
    return requests


def alone(
    num_output_tokens: int,
    vocab_size: int = 15000,
    seed: int = 0,
    num_tokens: int = ALONE_TOKENS,
) -> TextRequest:
    """Returns a prompt of `num_tokens` tokens."""
    rng = random.Random(f"alone {seed}")
    ids = [rng.randrange(20, vocab_size) for _ in range(num_tokens)]
    return TextRequest(token_ids=ids, num_output_tokens=num_output_tokens)


def image_prompt(model_type: str) -> str:
    """Returns the prompt of a question about one image."""
    mark = IMAGE_MARKS.get(model_type, QWEN_MARK)
    return f"<|im_start|>user\n{mark}{QUESTION}<|im_end|>\n<|im_start|>assistant\n"


def images(num_images: int = 16, seed: int = 0) -> list[Image.Image]:
    """Returns images of smooth random colours, different for each seed."""
    rng = np.random.default_rng(seed)
    size = (IMAGE_SIZE, IMAGE_SIZE)
    return [
        Image.fromarray(rng.integers(0, 255, (14, 14, 3), dtype=np.uint8)).resize(
            size, Image.Resampling.BICUBIC
        )
        for _ in range(num_images)
    ]
