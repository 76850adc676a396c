"""Parakeet: three ways to find tokens in the frames of a FastConformer.

    CTC     a head says a token for each frame; the same one in a row is said once
    RNNT    a head says the next token of a frame and of what was said so far, until it says none
    TDT     it says as well how many frames further the next token is looked for

Shapes: B sounds that go on, L frames, H channels of the decoder, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.activations import ACT2FN

from mmdeploy_llm.layers import Embedding, Linear, keep_sums
from mmdeploy_llm.weights.map import Replacement

from .aligned import AlignedLM, Found
from .search import Walk

LSTM = r"^decoder\.lstm\.(weight|bias)_{}_l(\d+)$"


class FrameHead(nn.Module):
    """The head of CTC, which checkpoints store as a convolution of one frame."""

    def __init__(self, size: int, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, size, 1), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(vocab_size), requires_grad=False)

    def forward(self, states: Tensor) -> Tensor:
        """Returns logits, [N, size] -> [N, V]."""
        return F.linear(states.to(self.weight.dtype), self.weight[:, :, 0], self.bias)


class ParakeetForCTC(AlignedLM):
    """transformers' class of the same name."""

    ctc_head: nn.Module

    def __init__(self, config: Any) -> None:
        size = config.encoder_config.hidden_size
        super().__init__(config, size, config.pad_token_id)
        self.ctc_head = FrameHead(size, config.vocab_size)
        self.map_weights()

    def found_in(self, frames: Sequence[Tensor]) -> Sequence[Found]:
        """See AlignedLM. A token's state is that of its first frame."""
        return [self._found(own) for own in frames]

    def _found(self, frames: Tensor) -> Found:
        said = self.ctc_head(frames).argmax(-1)
        tokens, counts = said.unique_consecutive(return_counts=True)
        ends = counts.cumsum(0)
        own = tokens != self.blank
        begins = (ends - counts)[own]
        return Found(states=frames[begins], tokens=tokens[own], begins=begins, ends=ends[own])

    def token_logits(self, states: Tensor) -> Tensor:
        """See AlignedLM."""
        out: Tensor = self.ctc_head(states)
        return out


class LSTMLayer(nn.Module):
    """A layer of the decoder, for one token."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.input, self.hidden = (Linear(size, 4 * size, bias=True) for _ in range(2))

    def forward(self, x: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the next hidden state and cell, all [B, H]."""
        in_gate, forget, new, out = (self.input(x) + self.hidden(hidden)).chunk(4, -1)
        cell = forget.sigmoid() * cell + in_gate.sigmoid() * new.tanh()
        return out.sigmoid() * cell.tanh(), cell


class Decoder(nn.Module):
    """Reads what was said so far."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, count = config.decoder_hidden_size, config.num_decoder_layers
        self.embedding = Embedding(config.vocab_size, size)
        self.layers = nn.ModuleList(LSTMLayer(size) for _ in range(count))
        self.decoder_projector = Linear(size, size, bias=True)

    def forward(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Reads a token of each, [B]. states: hidden states and cells [2, layers, B, H]. Returns
        the output [B, H] and the next states."""
        x, found = self.embedding(tokens), []
        for layer, hidden, cell in zip(self.layers, *states, strict=True):
            x, cell = layer(x, hidden, cell)
            found.append(torch.stack([x, cell]))
        return self.decoder_projector(x), torch.stack(found, 1)


class Joint(nn.Module):
    """Says the next token of a frame and of what was said so far. size: of V and what follows."""

    def __init__(self, config: Any, size: int) -> None:
        super().__init__()
        self.activation = ACT2FN[config.hidden_act]
        self.head = Linear(config.decoder_hidden_size, size, bias=True)
        keep_sums(self.head)


class ParakeetForRNNT(AlignedLM):
    """transformers' class of the same name."""

    durations: tuple[int, ...] = ()

    def __init__(self, config: Any) -> None:
        size = config.decoder_hidden_size
        super().__init__(config, size, config.blank_token_id)
        self.most = int(config.max_symbols_per_step)
        self.encoder_projector = Linear(config.encoder_config.hidden_size, size, bias=True)
        self.decoder = Decoder(config)
        self.joint = Joint(config, config.vocab_size + len(self.durations))
        self.map_weights()

    def map_weights(self, *renames: tuple[str, Replacement]) -> None:
        """See AlignedLM."""
        super().map_weights(
            (LSTM.format("ih"), r"decoder.layers.\2.input.\1"),
            (LSTM.format("hh"), r"decoder.layers.\2.hidden.\1"),
            *renames,
        )

    def found_in(self, frames: Sequence[Tensor]) -> Sequence[Found]:
        """See AlignedLM. All sounds are walked through together."""
        sounds = pad_sequence([self.encoder_projector(own) for own in frames], batch_first=True)
        walk = Walk(
            lengths=torch.tensor([len(own) for own in frames], device=sounds.device),
            blank=self.blank,
            most=self.most,
            durations=torch.tensor(self.durations, device=sounds.device),
        )
        count, layers = len(frames), len(self.decoder.layers)
        states = sounds.new_zeros((2, layers, count, sounds.shape[-1]))
        said, states = self.decoder(walk.own.new_full((count,), self.blank), states)
        while len(walk.own):
            joined = self.joint.activation(sounds[walk.own, walk.at] + said)
            logits = self.joint.head(joined)
            spoken, left = walk.step(joined, logits[:, : self.vocab_size], logits)
            if len(spoken.places):
                out, after = self.decoder(spoken.tokens, states[:, :, spoken.places])
                said = said.index_copy(0, spoken.places, out)
                states = states.index_copy(2, spoken.places, after)
            if left is not None:
                said, states = said[left], states[:, :, left]
        return walk.found(count, sounds.new_empty((0, sounds.shape[-1])))

    def token_logits(self, states: Tensor) -> Tensor:
        """See AlignedLM."""
        out: Tensor = self.joint.head(states.to(self.encoder.dtype))[:, : self.vocab_size]
        return out


class ParakeetForTDT(ParakeetForRNNT):
    """transformers' class of the same name."""

    def __init__(self, config: Any) -> None:
        self.durations = tuple(config.durations)
        super().__init__(config)
