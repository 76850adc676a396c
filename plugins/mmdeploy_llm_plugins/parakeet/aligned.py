"""A model whose tokens are found in the frames of a sound one after the other, and that no token
before them can change: all are found when the sound is encoded, and kept as what the engine reads
as keys and values of its item.

    row       0        1        2       the last
    key       state    state    state   0          of which the head makes the token's logits
              token    token    token   blank      the last one ends the answer
    value     frames begin .. end at which the token was found

The engine's step at position i reads row i, so that requests of a batch, and those that are begun
again, share nothing. Shapes: L frames, U tokens, H channels of a state, V vocabulary, T tokens of a
step.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.parakeet.modeling_parakeet import ParakeetEncoder

from mmdeploy_llm.caches import CrossKV
from mmdeploy_llm.forward import ForwardInputs, SequenceAttention
from mmdeploy_llm.hooks import MediaInput, MediaSpan
from mmdeploy_llm.weights.map import Replacement, Target, WeightMap
from mmdeploy_llm_plugins.transformers_parts.fast_conformer import COUNTERS
from mmdeploy_llm_plugins.transformers_parts.tower import TransformersTower

NEVER = -1e9  # the logit of a token that cannot be; finite, so that it can be written


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The tokens of a sound. states: [U, H]. tokens, begins, ends: [U] int64, frames of the
    encoder."""

    states: Tensor
    tokens: Tensor
    begins: Tensor
    ends: Tensor


class AlignedLM(nn.Module):
    """An encoder of frames, and what a subclass adds to find tokens in them.

    tower: transformers' class of the encoder. ignored: patterns of weights that are not read.
    size: H. vocab_size: V. blank: the token of frames that say none, which ends answers.
    """

    tower: ClassVar[Any] = ParakeetEncoder
    ignored: tuple[str, ...] = (COUNTERS,)
    num_layers, num_kv_heads, head_dim = 1, 1, 64  # of a cache that nothing is written to
    attends_itself = True

    def __init__(self, config: Any, size: int, blank: int) -> None:
        super().__init__()
        self.vocab_size, self.blank, self.hidden_size = config.vocab_size, blank, size + 1
        self.cross = CrossKV(
            num_layers=1, num_kv_heads=1, head_dim=self.hidden_size, has_row_each=False
        )
        self.encoder = TransformersTower(copy.deepcopy(config.encoder_config), self.tower)
        self.weight_map: WeightMap

    def map_weights(self, *renames: tuple[str, Replacement]) -> None:
        """Says where weights go; called once all modules are made."""
        own = (r"^encoder\.", "encoder.inner."), *renames
        self.weight_map = WeightMap(self, renames=own, ignored=self.ignored)

    @abstractmethod
    def found_in(self, frames: Sequence[Tensor]) -> Sequence[Found]:
        """Returns the tokens of each sound, of frames [L, encoder size]."""

    @abstractmethod
    def token_logits(self, states: Tensor) -> Tensor:
        """Multiplies by the head, [N, H] -> [N, V] float32."""

    def encode_media(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Returns the rows of each sound, [1, 2, U + 1, 1, hidden] float32."""
        return [self._kept(own) for own in self.found_in(self.heard(items))]

    def arguments(self, item: MediaInput) -> Mapping[str, Any]:
        """Returns what the encoder is called with besides frames; by default nothing."""
        return {}

    def heard(self, items: Sequence[MediaInput]) -> list[Tensor]:
        """Returns the encoder's output of each sound, [L, encoder size]; those of one length and
        call are computed at once, so that none is padded."""
        device = next(self.encoder.parameters()).device
        groups = dict[tuple[Any, ...], list[int]]()
        features = [_trimmed(item) for item in items]
        for at, own in enumerate(features):
            key = len(own), *self.arguments(items[at]).items()
            groups.setdefault(key, []).append(at)
        heard = dict[int, Tensor]()
        for (_, *arguments), places in groups.items():
            group = torch.stack([features[at] for at in places]).to(device, self.encoder.dtype)
            out = self.encoder.inner(group, **dict(arguments)).last_hidden_state
            heard.update(zip(places, out.unbind(), strict=True))
        return [heard[at] for at in range(len(items))]

    def _kept(self, found: Found) -> Tensor:
        count, size = found.states.shape
        rows = found.states.new_zeros((1, 2, count + 1, 1, size + 1), dtype=torch.float32)
        keys, values = rows[0, :, :, 0]
        keys[:-1, :-1] = found.states
        keys[:-1, -1] = found.tokens
        keys[-1, -1] = self.blank
        values[:-1, 0], values[:-1, 1] = found.begins, found.ends
        return rows

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Returns the rows of the tokens that follow, [T, hidden] float32."""
        attn, cross = inputs.attn, inputs.cross
        assert isinstance(attn, SequenceAttention), "the model has attends_itself"
        assert cross is not None, "the model has the attribute cross"
        out = [
            self._rows(cross.of(at, 0), inputs.positions[own.start : own.end])
            for at, own in enumerate(attn.sequences)
        ]
        return torch.cat(out)

    def _rows(self, kept: tuple[Tensor, Tensor] | None, positions: Tensor) -> Tensor:
        """Returns the rows of a sequence at these positions; without a sound that of its end."""
        if kept is None:
            rows = torch.zeros(len(positions), self.hidden_size, device=positions.device)
            rows[:, -1] = self.blank
            return rows
        keys = kept[0][:, 0]
        return keys[positions.clamp(max=len(keys) - 1)]

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits of rows, [N, hidden] -> [N, V] float32. That of a row's token is the
        largest, by the least step if rounding had two alike; after the last one the answer ends."""
        tokens = hidden[:, -1:].long()
        is_end = tokens == self.blank
        out = self.token_logits(hidden[:, :-1]).float().masked_fill(is_end, NEVER)
        top = out.amax(-1, keepdim=True)
        above = torch.nextafter(top, torch.full_like(top, torch.inf))
        top = torch.where(out.gather(1, tokens) == top, top, above)
        return out.scatter(1, tokens, torch.where(is_end, 0.0, top))

    def answer_attention(self, kept: Tensor, num_tokens: int) -> Tensor:
        """See hooks.Model: the first of two heads looks at the frame at which a token begins, the
        second at that before which it ends, [num_tokens, 2, frames]."""
        spans = kept[0, 1, :num_tokens, 0, :2].long()
        return F.one_hot(spans, int(spans.max()) + 1).float()

    def positions(self, num_tokens: int, media: Sequence[MediaSpan]) -> Tensor | None:
        """Returns None: token i is at position i."""
        return None

    def weight_targets(self, key: str) -> Sequence[Target] | None:
        """See hooks.Model."""
        return self.weight_map.targets(key)


def _trimmed(item: MediaInput) -> Tensor:
    """Returns the frames of a sound that are no padding, [frames, mels]."""
    count = int(item.tensors["attention_mask"].sum())
    return item.tensors["input_features"][0, :count]
