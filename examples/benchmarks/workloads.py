"""The text workload every engine runs here: token-id prompts of uneven length, fixed output
lengths."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """A prompt as token ids, and how many tokens to generate."""

    token_ids: list[int]
    num_output_tokens: int


def text(num_requests: int = 32, vocab_size: int = 15000, seed: int = 0) -> list[TextRequest]:
    """Prompts of 64-192 tokens with 32-96 output tokens each: 4,197 in and 1,997 out by default."""
    rng = random.Random(seed)
    requests = []
    for _ in range(num_requests):
        ids = [rng.randrange(20, vocab_size) for _ in range(rng.randint(64, 192))]
        requests.append(TextRequest(token_ids=ids, num_output_tokens=rng.randint(32, 96)))
    return requests
