"""Pooler: makes vectors and scores of the hidden states of a step's prompts.

    step 1   [a a a a | b b b]          sums, first states or vectors of tokens are kept as pieces
    step 2   [a a | c c c c c c]        a ends: its pieces and this step's rows become its vector

Shapes: T tokens of a step, N requests, H hidden size, S size of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdeploy_llm.errors import PluginContractError
from mmdeploy_llm.values.plan import RequestFailure
from mmdeploy_llm.values.pooling_request import PoolingRequest

from .heads import ACTIVATIONS
from .lengths import Floats, normalized, shaped
from .rules import NO_RULES, EmbeddingRules

MAX_LOGITS = 256  # rows of logits at once: those of a whole step would take gigabytes
OfRows = Callable[[Tensor], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRows:
    """The tokens of one prompt in a step: rows first .. end, the tokens of the prompt from `start`
    on. is_last: whether the prompt ends with them. token_ids: of the whole prompt."""

    request_id: str
    wanted: PoolingRequest
    start: int
    first: int
    end: int
    is_last: bool
    token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Holds what the tokens of one step, from `start` on, add to a request: the sum of `count`
    states [H], a first state [H], vectors of tokens [count, S] on the host, or a likelihood."""

    start: int
    count: int
    value: Any


class Pooler:
    """Holds what the steps so far have added to each request whose prompt is not computed yet. The
    runner is its only user."""

    def __init__(
        self,
        model: Any,
        name: str = "",
        rules: EmbeddingRules = NO_RULES,
        of_rows: OfRows = nullcontext,
    ) -> None:
        """model: with the optional attributes of hooks.objects.model.Model. name: of it, in
        messages. rules: of its folder. of_rows: says of which rows of the step the model computes
        within the context, for the adapters that these have."""
        self._model, self._name = model, name or type(model).__name__
        self._of_rows = of_rows
        self._rules = rules
        self._pieces: dict[str, list[_Piece]] = {}

    def drop(self, request_id: str) -> None:
        """Forgets a request that has ended or is computed again; unknown ones are ignored."""
        self._pieces.pop(request_id, None)

    def add(self, rows: Sequence[PromptRows], hidden: Tensor) -> dict[str, Floats | RequestFailure]:
        """Adds the states of a step and returns the vectors of the prompts that end with it, or why
        a request has none. A step that is computed again replaces what it added.

        hidden: [T, H].
        """
        for own in rows:
            before = self._pieces.get(own.request_id, ())
            self._pieces[own.request_id] = [one for one in before if one.start < own.start]
        self._add_sums([own for own in rows if _pools(own, "mean")], hidden)
        self._add_firsts([own for own in rows if _pools(own, "cls") and not own.start], hidden)
        self._add_tokens([own for own in rows if own.wanted.what == "token_vectors"], hidden)
        self._add_likelihoods([own for own in rows if own.wanted.what == "likelihood"], hidden)
        ended = [own for own in rows if own.is_last]
        return self._vectors(ended, hidden)

    def _add_sums(self, rows: Sequence[PromptRows], hidden: Tensor) -> None:
        if not rows:
            return
        own_rows, counts = _used_rows(rows)
        states = _picked(hidden, own_rows).float()
        lengths = torch.tensor(counts, device=hidden.device)
        sums = torch.segment_reduce(states, "sum", lengths=lengths, axis=0)
        for own, count, value in zip(rows, counts, sums.unbind(), strict=True):
            self._keep(own, count, value)

    def _add_firsts(self, rows: Sequence[PromptRows], hidden: Tensor) -> None:
        if rows:
            firsts = hidden[torch.tensor([own.first for own in rows], device=hidden.device)]
            for own, value in zip(rows, firsts.float().unbind(), strict=True):
                self._keep(own, 1, value)

    def _add_tokens(self, rows: Sequence[PromptRows], hidden: Tensor) -> None:
        if rows:
            own_rows, counts = _used_rows(rows)
            with self._of_rows(torch.from_numpy(own_rows)):
                vectors = self._embedded(_picked(hidden, own_rows)).float().cpu().numpy()
            parts = np.split(vectors, np.cumsum(counts)[:-1])
            for own, count, value in zip(rows, counts, parts, strict=True):
                self._keep(own, count, value)

    def _add_likelihoods(self, rows: Sequence[PromptRows], hidden: Tensor) -> None:
        """Adds the log-likelihood of the tokens that follow those of this step."""
        found: list[tuple[PromptRows, int, Sequence[int]]] = []  # request, first row, next tokens
        for own in rows:
            begin = max(own.start, own.wanted.num_skipped - 1)
            end = min(own.start + own.end - own.first, len(own.token_ids) - 1)
            if begin < end:
                targets = own.token_ids[begin + 1 : end + 1]
                found.append((own, own.first + begin - own.start, targets))
        if not found:
            return
        counts = [len(targets) for _, _, targets in found]
        picked = np.concatenate([np.arange(row, row + len(ids)) for _, row, ids in found])
        following = np.concatenate([np.array(ids, dtype=np.int64) for _, _, ids in found])
        slices = (slice(at, at + MAX_LOGITS) for at in range(0, len(picked), MAX_LOGITS))
        values = [self._likelihoods(hidden, picked[own], following[own]) for own in slices]
        parts = np.split(np.concatenate(values), np.cumsum(counts)[:-1])
        for (own, _, _), count, value in zip(found, counts, parts, strict=True):
            self._keep(own, count, float(value.sum()))

    def _likelihoods(
        self, hidden: Tensor, rows: NDArray[np.int64], following: NDArray[np.int64]
    ) -> Floats:
        """Returns the log-likelihood of the token that follows each of these rows."""
        with self._of_rows(torch.from_numpy(rows)):
            logits: Tensor = self._model.logits(_picked(hidden, rows)).float()
        own = logits.gather(1, torch.from_numpy(following).to(logits.device)[:, None])[:, 0]
        found: Floats = (own - logits.logsumexp(1)).cpu().numpy()
        return found

    def _keep(self, own: PromptRows, count: int, value: Any) -> None:
        piece = _Piece(start=own.start, count=count, value=value)
        self._pieces[own.request_id].append(piece)

    def _vectors(
        self, ended: Sequence[PromptRows], hidden: Tensor
    ) -> dict[str, Floats | RequestFailure]:
        found: dict[str, Floats | RequestFailure] = {}
        for own in ended:
            if own.wanted.what == "token_vectors":
                parts = [one.value for one in self._pieces[own.request_id]]
                found[own.request_id] = _finished(np.concatenate(parts), own.wanted)
            elif own.wanted.what == "likelihood":
                pieces = self._pieces[own.request_id]
                sums = [sum(one.value for one in pieces), sum(one.count for one in pieces)]
                found[own.request_id] = _finished(np.array(sums, dtype=np.float32), own.wanted)
        for what, make in (("vector", self._embedded), ("score", self._scored)):
            rows = [own for own in ended if own.wanted.what == what]
            if rows:
                with self._of_rows(torch.tensor([own.end - 1 for own in rows])):
                    values = make(self._pooled(rows, hidden)).float().cpu().numpy()
                for own, value in zip(rows, values, strict=True):
                    pooled = value[:0] if self._is_empty(own) else value
                    found[own.request_id] = _finished(pooled, own.wanted)
        return found

    def _is_empty(self, own: PromptRows) -> bool:
        """Whether a mean has no token, since all of them are those of an instruction."""
        pieces = self._pieces[own.request_id]
        return _pools(own, "mean") and not sum(one.count for one in pieces)

    def _pooled(self, rows: Sequence[PromptRows], hidden: Tensor) -> Tensor:
        """Returns the pooled states [N, H] in the model's dtype."""
        ends = torch.tensor([own.end - 1 for own in rows], device=hidden.device)
        if all(_pools(own, "last") for own in rows):
            return hidden[ends]
        pooled = hidden[ends].float()
        for index, own in enumerate(rows):
            if not _pools(own, "last"):
                pieces = self._pieces[own.request_id]
                total = torch.stack([one.value for one in pieces]).sum(0)
                pooled[index] = total / max(1, sum(one.count for one in pieces))
        return pooled.to(hidden.dtype)

    def _embedded(self, pooled: Tensor) -> Tensor:
        embedding = getattr(self._model, "embedding", None)
        return pooled if embedding is None else self._checked("embedding", embedding, pooled)

    def _scored(self, pooled: Tensor) -> Tensor:
        if self._rules.score_tokens is None:
            scores = self._checked("score", self._model.score, pooled).float()
        else:
            yes, no = self._rules.score_tokens
            logits = self._model.logits(pooled).float()
            scores = logits[:, yes : yes + 1]
            if no is not None:
                scores = scores - logits[:, no : no + 1]
        activation = self._rules.activation
        return scores if activation is None else ACTIVATIONS[activation](scores)

    def _checked(self, method: str, call: Any, pooled: Tensor) -> Tensor:
        found = call(pooled)
        if isinstance(found, Tensor) and found.ndim == 2 and len(found) == len(pooled):
            return found
        given = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise PluginContractError(
            f"{method} of {self._name} returned {given}, must be a row for each of "
            f"{len(pooled)} rows"
        )


def _pools(own: PromptRows, pooling: str) -> bool:
    return own.wanted.what in ("vector", "score") and own.wanted.pooling == pooling


def _used_rows(rows: Sequence[PromptRows]) -> tuple[NDArray[np.int64], list[int]]:
    """Returns the rows of the step whose states are used, and how many of each request."""
    skipped = [min(own.end - own.first, max(0, own.wanted.num_skipped - own.start)) for own in rows]
    ranges = [np.arange(own.first + n, own.end) for own, n in zip(rows, skipped, strict=True)]
    return np.concatenate(ranges), [len(each) for each in ranges]


def _picked(hidden: Tensor, rows: NDArray[np.int64]) -> Tensor:
    return hidden if len(rows) == len(hidden) else hidden[torch.from_numpy(rows).to(hidden.device)]


def _finished(value: Floats, wanted: PoolingRequest) -> Floats | RequestFailure:
    """Returns a vector, or one for each token, cut and normalised as wanted; why there is none."""
    if not value.size:
        words = "the prompt has no tokens besides its instruction; give some text"
        return RequestFailure(code=400, message=words)
    if not np.isfinite(value).all():
        name = (wanted.what or "vector").replace("token_vectors", "vector")
        words = (
            f"the {name} is not finite: the model has computed inf or nan for this prompt; try "
            "dtype='float32'"
        )
        return RequestFailure(code=500, message=words)
    if wanted.what == "score" and value.size > 1:
        words = f"this model scores {value.size} labels; a query and a document need one score"
        return RequestFailure(code=400, message=words)
    if wanted.what in ("score", "likelihood"):
        return value
    size = value.shape[-1]
    if wanted.dimensions is not None and wanted.dimensions > size:
        words = f"dimensions = {wanted.dimensions}, but the model's vectors have {size}; lower it"
        return RequestFailure(code=400, message=words)
    if wanted.num_windows > 1:  # their mean is cut
        return normalized(value) if wanted.normalize else value
    return shaped(value, wanted)
