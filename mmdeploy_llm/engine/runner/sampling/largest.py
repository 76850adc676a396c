"""Finds the largest values of each row exactly, in one pass over the vocabulary, through block
maxima.

Shapes: R rows, V vocabulary, B blocks, W width of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmdeploy_llm.kernels import TORCH, Kernels

WIDTH = 128  # columns of a block: maxima then run at memory speed in float32 and bfloat16
MAX_SIZE_BY_BLOCKS = 128  # for more values, topk over whole rows is as fast


def first_argmax(logits: Tensor, kernels: Kernels = TORCH) -> tuple[Tensor, Tensor]:
    """Returns the lowest index of the largest value of each row of [R, V], [R] int64, and that
    value, [R].

    A NaN counts as largest, as in torch.argmax. Maxima are vectorised on CPUs and argmax is not, so
    argmax runs over block maxima and then over one block only: 5 to 10 times faster. Kernels read
    each row once.
    """
    if kernels.can_draw(logits):
        return kernels.first_largest(logits)
    vocab_size = logits.shape[1]
    if vocab_size < 2 * WIDTH:
        index = logits.argmax(dim=1, keepdim=True)
        return index[:, 0], logits.gather(1, index)[:, 0]
    maxima = _block_maxima(logits)
    whole = maxima.shape[1] * WIDTH
    if whole < vocab_size:
        maxima = torch.cat([maxima, logits[:, whole:].amax(dim=1, keepdim=True)], dim=1)
    columns = _columns(maxima.argmax(dim=1, keepdim=True))
    columns.clamp_(max=vocab_size - 1)  # repeats of the last index never win: the first one does
    index = columns.gather(1, logits.gather(1, columns).argmax(dim=1, keepdim=True))
    return index[:, 0], logits.gather(1, index)[:, 0]


def largest(logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Returns the `size` largest values of each row of [R, V], descending [R, size], and their
    indices.

    The values are exact; which of several equal ones are chosen is unspecified. NaN counts as
    largest. `size` <= V.
    """
    num_rows, vocab_size = logits.shape
    if size > MAX_SIZE_BY_BLOCKS or vocab_size < 4 * size * WIDTH:
        found = logits.topk(size, dim=1)
        return found.values, found.indices
    # A block whose maximum is not among the `size` largest maxima holds none of the `size` values.
    maxima = _block_maxima(logits)
    columns = _columns(maxima.topk(size, dim=1, sorted=False).indices)
    rest = torch.arange(maxima.shape[1] * WIDTH, vocab_size, device=logits.device)
    columns = torch.cat([columns, rest.expand(num_rows, -1)], dim=1)
    found = logits.gather(1, columns).topk(size, dim=1)
    return found.values, columns.gather(1, found.indices)


def _block_maxima(logits: Tensor) -> Tensor:
    """Returns the maxima of all complete blocks, [R, B]."""
    num_rows, vocab_size = logits.shape
    num_blocks = vocab_size // WIDTH
    return logits[:, : num_blocks * WIDTH].view(num_rows, num_blocks, WIDTH).amax(dim=2)


def _columns(blocks: Tensor) -> Tensor:
    """Returns the columns of some blocks of each row, [R, n] -> [R, n * W]."""
    return (blocks[:, :, None] * WIDTH + torch.arange(WIDTH, device=blocks.device)).flatten(1)
