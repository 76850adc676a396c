"""Walk: goes through the frames of several sounds together, each at its own pace.

    RNNT    a token is said: the frame stays, unless it has said its most; none: the next frame
    TDT     as many frames further as the head says with it; at least one where no token is said

That is the greedy search of transformers' generate. Shapes: B sounds that go on, N tokens of one
step, V vocabulary, H channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .aligned import Found


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """The tokens of one step, [N], and the places, [N], of their sounds among those that go on."""

    tokens: Tensor
    places: Tensor


class Walk:
    """Knows at which frame each sound is.

    own: [B] int64, the sounds that go on. at: [B], their frames.
    lengths: frames of each sound. most: tokens that a frame may say. durations: how many frames
    further each of the last logits leads; empty: none says so.
    """

    def __init__(self, *, lengths: Tensor, blank: int, most: int, durations: Tensor) -> None:
        self.own = torch.arange(len(lengths), device=lengths.device)
        self.at = torch.zeros_like(self.own)
        self._lengths, self._blank, self._most = lengths, blank, most
        self._durations = durations
        self._num_said = torch.zeros_like(self.own)  # at the frame, in a row
        self._num_steps = 0
        self._found = list[tuple[Tensor, ...]]()

    def step(self, states: Tensor, tokens: Tensor, logits: Tensor) -> tuple[Spoken, Tensor | None]:
        """Goes on by what the head says. states: [B, H], of which it says it. tokens: [B, V],
        logits of tokens. logits: [B, V + durations]. Returns the tokens that are said, and which
        places [B] go on; None: all of them."""
        said = tokens.argmax(-1)
        is_token = said != self._blank
        ahead, spans = self._pace(is_token, logits[:, tokens.shape[1] :])
        (places,) = is_token.nonzero(as_tuple=True)
        begins = self.at[places]
        ends = begins + spans[places]
        self._found.append((self.own[places], states[places], said[places], begins, ends))
        spoken = Spoken(tokens=said[places], places=places)
        self._num_steps += 1
        self.at = self.at + ahead
        lengths = self._lengths[self.own]
        # A head of durations that says tokens and goes nowhere ends where generate's longest does.
        left = (self.at < lengths) & (self._num_steps < self._most * lengths)
        if bool(left.all()):
            return spoken, None
        self.own, self.at, self._num_said = (
            one[left] for one in (self.own, self.at, self._num_said)
        )
        return spoken, left

    def _pace(self, is_token: Tensor, durations: Tensor) -> tuple[Tensor, Tensor]:
        """Returns how many frames each goes ahead, and how many a token has."""
        if len(self._durations):
            ahead = self._durations[durations.argmax(-1)]
            ahead = torch.where(is_token, ahead, ahead.clamp(min=1))
            return ahead, ahead
        counted = torch.where(is_token, self._num_said + 1, 0)
        is_ahead = ~is_token | (counted >= self._most)
        self._num_said = torch.where(is_ahead, 0, counted)
        return is_ahead.long(), torch.ones_like(counted)

    def found(self, count: int, nothing: Tensor) -> Sequence[Found]:
        """Returns what each of `count` sounds says. nothing: the states of no tokens, [0, H]."""
        empty = self.own.new_empty(0)
        steps = [(empty, nothing, empty, empty, empty), *self._found]
        sounds, states, tokens, begins, ends = (
            torch.cat(parts) for parts in zip(*steps, strict=True)
        )
        masks = [sounds == at for at in range(count)]
        return [
            Found(states=states[own], tokens=tokens[own], begins=begins[own], ends=ends[own])
            for own in masks
        ]
