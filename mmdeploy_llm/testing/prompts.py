"""Prompts of random tokens, with random media between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mmdeploy_llm.request import MediaSpan

from .reference import random_media

# Text stands between the frames of a video.
FRAMES_APART = ("qwen3_vl", "qwen3_vl_moe")


def make_prompt(
    config: Any, grids: Sequence[tuple[int, int, int]], *, seed: int = 0
) -> tuple[list[int], list[MediaSpan]]:
    """Random text with the media between, each within its family's start and end markers."""
    generator = torch.Generator().manual_seed(seed)
    vocab_size = config.get_text_config().vocab_size

    def text(num_tokens: int) -> list[int]:
        # The lower tenth of the vocabulary is left to special tokens.
        ids = torch.randint(vocab_size // 10, vocab_size, (num_tokens,), generator=generator)
        return [int(i) for i in ids]

    ids, media = text(9), []
    for index, grid in enumerate(grids):
        kind = "image" if grid[0] == 1 else "video"
        item = random_media(config, grid, kind=kind, seed=100 * seed + index)
        start, end = (_marker(config, kind, part) for part in ("start", "end"))
        placeholder = getattr(config, f"{kind}_token_id")
        num_runs = grid[0] if config.model_type in FRAMES_APART else 1
        offset = len(ids) + 1
        places: list[int] = []
        for number in range(num_runs):
            ids += [*(text(5) if number else ()), start]
            places += range(len(ids), len(ids) + item.num_tokens // num_runs)
            ids += [*[placeholder] * (item.num_tokens // num_runs), end]
        rows = None if num_runs == 1 else tuple(place - offset for place in places)
        media.append(MediaSpan(offset=offset, item=item, rows=rows))
        ids += text(4)
    # Long enough that the last position is the largest one, behind a video's last frame too: only
    # then do transformers' two ways to go on (last + 1, largest + 1) agree.
    return ids + text(12), media


def _marker(config: Any, kind: str, part: str) -> int:
    """Families mark images and videos apart (ERNIE) or alike (Qwen)."""
    apart = getattr(config, f"{kind}_{part}_token_id", None)
    return int(config.__dict__[f"vision_{part}_token_id"] if apart is None else apart)
