"""Runs a model without an engine, with plain attention that keeps every key and value: causal, or
in both directions where the model says so.

It is slow and simple on purpose: paged attention, chunks and batches must equal it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.caches import SharedKV, State, layer_caches
from mmdeploy_llm.forward import Alibi, ForwardInputs, SequenceRows
from mmdeploy_llm.hooks.objects.model import cross_of
from mmdeploy_llm.request import MediaSpan


class DenseSequence:
    """A prompt followed by its generated tokens, and how many of them are computed. Modified by
    `DenseRunner` only."""

    def __init__(
        self, prompt: Sequence[int], media: Sequence[MediaSpan], positions: Tensor
    ) -> None:
        self.token_ids = list(prompt)
        self.prompt_len = len(prompt)
        self.media = tuple(media)
        self.positions = positions  # [prompt_len] or [3, prompt_len]
        self.embeds: dict[str, Tensor] = {}
        self.num_computed = 0
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> keys, values [tokens, K, D]
        self.states: dict[int, tuple[Tensor, ...]] = {}  # layer -> states, each of its own shape

    def extend(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Appends the keys and values of the next tokens, [n, K, D], to those of a layer."""
        if layer in self.cache:
            keys, values = self.cache[layer]
            k, v = torch.cat([keys, k]), torch.cat([values, v])
        self.cache[layer] = k.clone(), v.clone()

    def position_at(self, index: int) -> Tensor:
        """Returns the position of token `index`; generated tokens continue from the largest of the
        prompt."""
        if index < self.prompt_len:
            return self.positions[..., index]
        position = int(self.positions.max()) + 1 + index - self.prompt_len
        return torch.full_like(self.positions[..., 0], position)

    def embed_at(self, index: int) -> Tensor | None:
        """Returns the media embedding of token `index`, or None for a text token."""
        for span in self.media:
            if span.rows == ():
                continue  # outside of the prompt
            row = index - span.offset
            if not span.offset <= index < span.end:
                continue
            if span.rows is None:
                return self.embeds[span.item.key][row]
            if row in span.rows:
                return self.embeds[span.item.key][span.rows.index(row)]
        return None


class DenseContext:
    """The attention of one step. pieces: (sequence, number of its tokens in this step) in the
    order of the rows. owners: the layer that stores the keys and values of each layer.
    is_bidirectional: see hooks.Model; the pieces are then whole sequences."""

    def __init__(
        self,
        pieces: Sequence[tuple[DenseSequence, int]],
        owners: Sequence[int],
        has_atomic_media: bool = False,
        *,
        is_bidirectional: bool = False,
    ) -> None:
        self._pieces = pieces
        self._owners = owners
        self._has_atomic_media = has_atomic_media
        self._is_bidirectional = is_bidirectional

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        alibi: Alibi | None = None,
    ) -> Tensor:
        """See forward.AttentionContext."""
        out, start = [], 0
        for sequence, count in self._pieces:
            rows = slice(start, start + count)
            start += count
            if k is not None and v is not None:
                sequence.extend(self._owners[layer], k[rows], v[rows])
            keys, values = sequence.cache[self._owners[layer]]
            if self._is_bidirectional:
                is_visible = _around(count, window)
            else:
                is_visible = _visible(sequence, count, len(keys), window, self._has_atomic_media)
            biases = None if alibi is None else alibi.biases(torch.arange(len(keys)))
            out.append(_attend(q[rows], keys, values, is_visible, scale, softcap, sinks, biases))
        return torch.cat(out)

    @property
    def sequences(self) -> Sequence[SequenceRows]:
        """See forward.SequenceAttention."""
        ends = accumulate(count for _, count in self._pieces)
        return [
            SequenceRows(start=end - count, end=end, num_cached=sequence.num_computed)
            for end, (sequence, count) in zip(ends, self._pieces, strict=True)
        ]

    def extend(
        self, sequence: int, layer: int, k: Tensor, v: Tensor, num_kept: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """See forward.SequenceAttention."""
        owner, _ = self._pieces[sequence]
        cached = owner.num_computed
        if layer in owner.cache:  # a second call in a step replaces the rows of the first
            keys, values = owner.cache[layer]
            owner.cache[layer] = keys[:cached], values[:cached]
        owner.extend(layer, k, v)
        first = 0 if num_kept is None else max(0, cached - num_kept)
        keys, values = owner.cache[layer]
        return keys[first:], values[first:]

    def causal(self) -> DenseContext:
        """See forward.AttentionContext."""
        return DenseContext(self._pieces, self._owners)


def _visible(
    sequence: DenseSequence, count: int, length: int, window: int | None, is_atomic: bool
) -> Tensor:
    """Returns the mask [count, length] of the keys, the first `length` tokens, that are visible to
    the queries, the last `count` of these."""
    queries, keys = torch.arange(length - count, length)[:, None], torch.arange(length)
    is_visible = keys <= queries
    if window is not None:
        is_visible &= keys > queries - window
    if is_atomic:
        for start, end in (run for span in sequence.media for run in span.runs):
            is_visible |= (queries >= start) & (queries < end) & (keys >= start) & (keys < end)
    return is_visible


def _around(length: int, window: int | None) -> Tensor:
    """Returns the mask [length, length] of attention in both directions: all tokens, or those of
    the window."""
    tokens = torch.arange(length)
    reach = length if window is None else window // 2
    return (tokens[:, None] - tokens).abs() <= reach


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_visible: Tensor,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    biases: Tensor | None,
) -> Tensor:
    """Attends from `q` [n, H, D] to `k`, `v` [L, K, D] with the mask [n, L]."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, 1).float() for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k)
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if biases is not None:
        scores = scores + biases[:, None]
    scores = scores.masked_fill(~is_visible.to(q.device), -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), -1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


class DenseStates:
    """The states of one step; see forward.StateContext. `store` keeps what the layers wrote."""

    def __init__(
        self, pieces: Sequence[tuple[DenseSequence, int]], layers: Mapping[int, State], dtype: Any
    ) -> None:
        """pieces: as for DenseContext. layers: those that keep a state. dtype: of the model."""
        self._sequences = [sequence for sequence, _ in pieces]
        self.query_lens = tuple(count for _, count in pieces)
        self.starts = torch.tensor((0, *accumulate(self.query_lens)))
        is_long = [count > 1 for count in self.query_lens]
        self.num_decode = is_long.index(True) if any(is_long) else len(is_long)
        num_rows = len(pieces)
        self.read = torch.arange(1, num_rows + 1)
        self.write = self.read + num_rows
        self.source, self.target = self.read, self.write
        self._by_layer = {}
        for layer, state in layers.items():
            columns = []
            for index, (shape, name) in enumerate(zip(state.shapes, state.dtypes, strict=True)):
                own = dtype if name == "model" else getattr(torch, name)
                rows = torch.zeros(2 * num_rows + 1, *shape, dtype=own)
                for row, sequence in enumerate(self._sequences):
                    if layer in sequence.states:
                        rows[row + 1] = sequence.states[layer][index]
                columns.append(rows)
            self._by_layer[layer] = tuple(columns)

    def tensors(self, layer: int) -> tuple[Tensor, ...]:
        """See forward.StateContext."""
        return self._by_layer[layer]

    def store(self) -> None:
        """Keeps the states after the step for the next ones."""
        for layer, columns in self._by_layer.items():
            for row, sequence in enumerate(self._sequences):
                sequence.states[layer] = tuple(x[self.write[row]].clone() for x in columns)


class DenseCross:
    """The keys and values of the encoder's items of one step; see forward.CrossContext."""

    def __init__(self, pieces: Sequence[tuple[DenseSequence, int]]) -> None:
        self._pieces = pieces

    def attend(
        self, layer: int, q: Tensor, kernels: object = None, *, scale: float | None = None
    ) -> Tensor:
        """See forward.CrossContext."""
        out, start = [], 0
        for sequence, count in self._pieces:
            rows = q[start : start + count]
            start += count
            if not sequence.media:
                out.append(torch.zeros_like(rows))
                continue
            own = [sequence.embeds[span.item.key] for span in sequence.media]
            keys, values = torch.cat(own, 2)[layer]
            seen = _seen(sequence, count)
            seen |= ~seen.any(1, keepdim=True)
            out.append(_attend(rows, keys, values, seen, scale, None, None, None))
        return torch.cat(out)

    def of(self, sequence: int, layer: int) -> tuple[Tensor, Tensor] | None:
        """See forward.CrossContext."""
        owner, _ = self._pieces[sequence]
        if not owner.media:
            return None
        keys, values = torch.cat([owner.embeds[span.item.key] for span in owner.media], 2)[layer]
        return keys, values

    @property
    def has_items(self) -> bool:
        """See forward.CrossContext."""
        return any(sequence.media for sequence, _ in self._pieces)

    @property
    def blind_rows(self) -> Tensor | None:
        """See forward.CrossContext."""
        seen = torch.cat([_seen(*piece).any(1) for piece in self._pieces])
        return None if seen.all() else (~seen).nonzero()[:, 0]


def _seen(sequence: DenseSequence, count: int) -> Tensor:
    """Returns the mask [count, tokens] of the tokens of the sequence's items that are meant for the
    next `count` tokens."""
    found = [torch.zeros(count, 0, dtype=torch.bool)]
    for span in sequence.media:
        own = torch.ones(count, span.item.num_tokens, dtype=torch.bool)
        if span.view is not None:
            tokens = torch.arange(sequence.num_computed, sequence.num_computed + count)
            own[tokens < span.view.first] = False
            own[:, span.view.num_tokens :] = False
            if span.view.end is not None:
                own[tokens >= span.view.end] = False
        found.append(own)
    return torch.cat(found, 1)


class DenseRunner:
    """Runs one model (see hooks.Model) on any number of sequences.

    has_atomic_media: see hooks.ModelSpec; if set, the pieces of a step must not split media.
    """

    def __init__(
        self, model: Any, device: torch.device | None = None, *, has_atomic_media: bool = False
    ) -> None:
        self.model = model
        self.has_atomic_media = has_atomic_media
        self.device = device or torch.device("cpu")
        self._is_bidirectional = bool(getattr(model, "is_bidirectional", False))
        self._has_cross = cross_of(model) is not None
        layers = list(enumerate(layer_caches(model)))
        self._owners = [
            layer.layer if isinstance(layer, SharedKV) else index for index, layer in layers
        ] or list(range(model.num_layers))
        self._stateful = {index: layer for index, layer in layers if isinstance(layer, State)}

    def add(self, prompt: Sequence[int], media: Sequence[MediaSpan] = ()) -> DenseSequence:
        """Returns a new sequence, with its media encoded in one call."""
        positions = self.model.positions(len(prompt), media)
        if positions is None:
            positions = torch.arange(len(prompt))
        sequence = DenseSequence(prompt, media, positions)
        items = [span.item for span in media]
        if items:
            with torch.inference_mode():
                embeds = self.model.encode_media(items)
            sequence.embeds = {item.key: embed for item, embed in zip(items, embeds, strict=True)}
        return sequence

    @torch.inference_mode()
    def step(self, pieces: Sequence[tuple[DenseSequence, int]]) -> Tensor:
        """Computes the next tokens of all sequences in one packed forward; returns the logits
        [T, vocab] of all rows."""
        logits: Tensor = self.model.logits(self.hidden(pieces))
        return logits

    @torch.inference_mode()
    def hidden(self, pieces: Sequence[tuple[DenseSequence, int]]) -> Tensor:
        """Computes as `step` does; returns the hidden states [T, hidden] of all rows."""
        inputs = self._inputs(pieces)
        hidden: Tensor = self.model.forward(inputs)
        if isinstance(inputs.states, DenseStates):
            inputs.states.store()
        for sequence, count in pieces:
            sequence.num_computed += count
        return hidden

    def run(self, sequence: DenseSequence, chunk_size: int | None = None) -> Tensor:
        """Computes all remaining tokens in chunks; returns their logits."""
        logits = []
        while sequence.num_computed < len(sequence.token_ids):
            left = len(sequence.token_ids) - sequence.num_computed
            logits.append(self.step([(sequence, min(left, chunk_size or left))]))
        return torch.cat(logits)

    def generate(self, sequence: DenseSequence, num_tokens: int) -> list[int]:
        """Generates `num_tokens` greedy tokens; returns all tokens generated so far."""
        for _ in range(num_tokens):
            logits = self.run(sequence)
            sequence.token_ids.append(int(logits[-1].argmax()))
        return sequence.token_ids[sequence.prompt_len :]

    def _states(self, pieces: Sequence[tuple[DenseSequence, int]]) -> DenseStates | None:
        if not self._stateful:
            return None
        dtype = next(iter(self.model.parameters())).dtype
        return DenseStates(pieces, self._stateful, dtype)

    def _inputs(self, pieces: Sequence[tuple[DenseSequence, int]]) -> ForwardInputs:
        token_ids: list[int] = []
        positions, in_prompt = [], []
        rows, embeds = [], []
        for sequence, count in pieces:
            for index in range(sequence.num_computed, sequence.num_computed + count):
                row = sequence.embed_at(index)
                if row is not None:
                    rows.append(len(token_ids))
                    embeds.append(row)
                token_ids.append(sequence.token_ids[index])
                positions.append(sequence.position_at(index))
                in_prompt.append(index < sequence.prompt_len)
        return ForwardInputs(
            token_ids=torch.tensor(token_ids).to(self.device),
            positions=torch.stack(positions, -1).to(self.device),
            in_prompt=torch.tensor(in_prompt).to(self.device),
            attn=DenseContext(
                pieces,
                self._owners,
                self.has_atomic_media,
                is_bidirectional=self._is_bidirectional,
            ),
            media_rows=torch.tensor(rows).to(self.device) if rows else None,
            media_embeds=torch.stack(embeds) if rows else None,
            states=self._states(pieces),
            cross=DenseCross(pieces) if self._has_cross else None,
        )
