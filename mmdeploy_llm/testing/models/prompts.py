"""Makes prompts of random tokens with random media."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mmdeploy_llm.request import MediaSpan
from mmdeploy_llm.testing.tiny import MediaForm, form_of

from .reference import random_media


def make_prompt(
    config: Any, grids: Sequence[tuple[int, int, int]], *, seed: int = 0
) -> tuple[list[int], list[MediaSpan]]:
    """Returns token ids and media of a prompt: random text with one media item per grid, each
    between the start and end markers of its family."""
    form = form_of(config.architectures)
    if form.prompt is not None:
        return form.prompt(config, grids, seed)
    generator = torch.Generator().manual_seed(seed)
    vocab_size = config.get_text_config().vocab_size

    def text(num_tokens: int) -> list[int]:
        # The lower tenth of the vocabulary may contain special tokens.
        ids = torch.randint(vocab_size // 10, vocab_size, (num_tokens,), generator=generator)
        return [int(i) for i in ids]

    ids, media = text(9), []
    for index, grid in enumerate(grids):
        is_video = grid[0] > 1 and not form.has_tiles
        kind = "video" if is_video else "image"
        item = random_media(
            config, grid, merge=form.merge_size(config), kind=kind, seed=100 * seed + index
        )
        start, end = (_marker(config, kind, side, form) for side in ("start", "end"))
        token = form.video_token if is_video else kind
        placeholder = getattr(config, f"{token}_token_id")
        num_runs = grid[0] if form.has_text_between else 1
        offset = len(ids) + 1
        positions: list[int] = []
        for number in range(num_runs):
            ids += [*(text(5) if number else ()), start]
            positions += range(len(ids), len(ids) + item.num_tokens // num_runs)
            ids += [*[placeholder] * (item.num_tokens // num_runs), end]
        rows = None if num_runs == 1 else tuple(position - offset for position in positions)
        media.append(MediaSpan(offset=offset, item=item, rows=rows))
        ids += text(4)
    # Enough text that the last position is the largest, even after a video: transformers continues
    # from last + 1 in some models and from largest + 1 in others, which then agree.
    return ids + text(12), media


def _marker(config: Any, kind: str, side: str, form: MediaForm) -> int:
    """Returns the id of a start or end marker; some families have different markers for images
    and videos, others the same. The last id of the vocabulary does where the config names none."""
    if form.has_tiles:
        return int(config.get_text_config().vocab_size) - 1
    own = getattr(config, f"{kind}_{side}_token_id", None)
    own = getattr(config, "boi_token_id" if side == "start" else "eoi_token_id", own)
    return int(config.__dict__[f"vision_{side}_token_id"] if own is None else own)
