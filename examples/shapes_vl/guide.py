"""Auxiliary losses on the model's hidden states that guide its training; discarded afterwards.

An answer alone teaches slowly: it is one word, for which several internal steps must be right at
once. The guide trains these steps one by one:

    seeing    an image token shows a colour, a kind and a size: its product with the embedding of
              "red" is larger than with that of "blue". So words and their appearance share a
              direction from the start, and simple attention finds the shape of a word.
    reading   halfway through the text model an image token knows its position, and the last word of
              "the red circle" knows how many shapes match and, if only one does, its attributes.
              (Rotary positions affect attention weights only, so that the position of a token is
              otherwise learnt late.)

Without the first the text model learns to ignore the image, whose tokens are noise at first: the
resampler ends up with one constant output, and does not recover in any affordable time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from data import Batch
from scenes import ROWS
from targets import CELL_CLASSES, IGNORE, MENTION_CLASSES, PLACES
from torch import Tensor, nn
from transformers import Ernie4_5_VLMoeForConditionalGeneration, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from train import Prediction

# Most image tokens show background only.
BACKGROUND_WEIGHT = 0.2
READING_WEIGHT = 0.3
WHERE_CLASSES = (len(ROWS), PLACES)


class Guide(nn.Module):
    """The heads of the auxiliary losses. Shapes: T image tokens, H hidden size."""

    def __init__(
        self, model: Ernie4_5_VLMoeForConditionalGeneration, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        super().__init__()
        hidden = model.config.text_config.hidden_size
        self.words = [
            [tokenizer.encode(f" {word}", add_special_tokens=False) for word in words]
            for words in CELL_CLASSES
        ]
        for split in (ids for group in self.words for ids in group if len(ids) != 1):
            raise ValueError(f"the word {tokenizer.decode(split)!r} has more than one token")
        self.background = nn.Linear(hidden, len(CELL_CLASSES))
        self.where = nn.Linear(hidden, sum(WHERE_CLASSES))
        self.named = nn.Linear(hidden, sum(MENTION_CLASSES))

    def seeing(self, image_tokens: Tensor, embeddings: Tensor, batch: Batch) -> Tensor:
        """Loss of colour, kind and size: image tokens [T, H] times word embeddings [words, H]."""
        targets = torch.from_numpy(batch.cells).unbind(-1)
        losses = []
        for number, words in enumerate(self.words):
            chosen = embeddings[torch.tensor(words)[:, 0]]
            nothing = self.background(image_tokens)[:, number : number + 1]
            logits = torch.cat([nothing, image_tokens @ chosen.T], dim=-1).float()
            importance = torch.ones(logits.shape[-1])
            importance[0] = BACKGROUND_WEIGHT
            losses.append(nn.functional.cross_entropy(logits, targets[number], importance))
        return torch.stack(losses).sum()

    def reading(self, said: Prediction, batch: Batch) -> Tensor:
        """Loss of positions of image tokens, and of attributes of the shapes that words name."""
        seen = self.where(said.halfway[said.is_image])
        where = torch.from_numpy(batch.cells[:, -len(WHERE_CLASSES) :])
        row, position, *_ = torch.from_numpy(batch.mentions).unbind(-1)
        named = self.named(said.halfway[row, position])
        what = torch.from_numpy(batch.mentions[:, 2:])
        losses = [
            *_entropies(seen, where, WHERE_CLASSES),
            *_entropies(named, what, MENTION_CLASSES),
        ]
        return READING_WEIGHT * torch.stack(losses).sum()


def _entropies(logits: Tensor, targets: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    """Return the mean cross-entropy of each group of classes."""
    parts = logits.float().split(sizes, dim=-1)
    return [
        nn.functional.cross_entropy(part, target, ignore_index=IGNORE)
        for part, target in zip(parts, targets.unbind(-1), strict=True)
    ]
