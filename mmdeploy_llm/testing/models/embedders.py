"""Checks of a model that gives vectors or scores and generates nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.hooks import MediaSpan

from .base import Check, CheckSkipped, attributed, demand
from .equalities import max_difference
from .models import (
    ModelSubject,
    builds_on_meta,
    encoding_together_equals_one_by_one,
    has_what_the_engine_asks_for,
    loads_the_checkpoint,
    missing_keys_are_refused,
    transformers_reference,
    unknown_keys_are_refused,
)
from .reference import Reference


class EmbedderReference:
    """transformers' model of a folder, asked for vectors and scores."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckSkipped where transformers has no such class."""
        loaded: Reference = transformers_reference(folder)
        self.model, self._media_inputs = loaded.model, loaded._media_inputs

    @torch.inference_mode()
    def vectors(self, prompt: Sequence[int], media: Sequence[MediaSpan] = ()) -> Tensor:
        """Returns the vectors of tokens [tokens, size] that the class gives, or the states of its
        last layer [tokens, hidden]; of a class with two towers the vector of the text, or of the
        image [size]."""
        if hasattr(self.model, "get_image_features") and hasattr(self.model, "get_text_features"):
            ids = torch.tensor([list(prompt)])
            if media:
                made = self.model.get_image_features(**self._media_inputs(ids, media))
            else:
                made = self.model.get_text_features(input_ids=ids)
            vector: Tensor = made.pooler_output[0]
            return vector
        found = self._asked(self.model, prompt, media)
        if getattr(found, "embeddings", None) is not None:
            vectors: Tensor = found.embeddings[0]
            return vectors
        if getattr(found, "last_hidden_state", None) is None:  # a head; the model is inside
            found = self._asked(self.model.base_model, prompt, media)
        states: Tensor = found.last_hidden_state[0]
        return states

    @torch.inference_mode()
    def scores(self, prompt: Sequence[int], media: Sequence[MediaSpan] = ()) -> Tensor:
        """Returns the logits of the labels, [labels]."""
        logits: Tensor = self._asked(self.model, prompt, media).logits[0]
        return logits

    def _asked(self, model: Any, prompt: Sequence[int], media: Sequence[MediaSpan]) -> Any:
        ids = torch.tensor([list(prompt)])
        return model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **self._media_inputs(ids, media),
        )


def states_of(subject: ModelSubject, names: Sequence[str]) -> list[Tensor]:
    """Returns the hidden states of the prompts of these cases, computed in one packed step."""
    runner = subject.runner
    with attributed("forward", "see the traceback"):
        pieces = [
            (runner.add(*subject.prompts[name]), len(subject.prompts[name][0])) for name in names
        ]
        hidden = runner.hidden(pieces)
    shape, rows = tuple(hidden.shape), sum(count for _, count in pieces)
    demand(
        shape == (rows, subject.model.hidden_size),
        f"forward returns {shape} for {rows} tokens; hidden states are [tokens, hidden_size]",
    )
    return list(torch.split(hidden, [count for _, count in pieces]))


def pooled(subject: ModelSubject, states: Tensor) -> Tensor:
    """Returns what the model's `default_pooling` makes of states [tokens, hidden]: [1, hidden], or
    all of them for "tokens"."""
    match subject.model.default_pooling:
        case "tokens":
            return states
        case "cls":
            return states[:1]
        case "last":
            return states[-1:]
        case "mean":
            return states.mean(0, keepdim=True)
        case other:
            demand(False, f"default_pooling is {other!r}; use 'cls', 'last', 'mean' or 'tokens'")
            raise AssertionError


def embedded(subject: ModelSubject, rows: Tensor) -> Tensor:
    """Returns what the model's `embedding`, if it has one, makes of pooled states or of those of
    tokens."""
    own = getattr(subject.model, "embedding", None)
    with torch.inference_mode():
        found: Tensor = rows if own is None else own(rows)
    return found


def vectors_of(subject: ModelSubject, states: Tensor) -> Tensor:
    """Returns the vectors of a prompt from its states, before any is normalised."""
    return embedded(subject, pooled(subject, states))


def vectors_equal_the_reference(subject: ModelSubject) -> None:
    """The vectors of every prompt, computed together in one step, are those of the reference."""
    names = list(subject.prompts)
    for name, states in zip(names, states_of(subject, names), strict=True):
        expected = subject.reference.vectors(*subject.prompts[name])
        found = vectors_of(subject, states) if expected.ndim == 1 else embedded(subject, states)
        error = max_difference(found.reshape(expected.shape), expected)
        demand(
            error < subject.tolerance,
            f"case {name!r}: the vectors differ from the reference by {error:.2g}, "
            f"{subject.tolerance:g} is allowed; compare layer by layer (norms and their place, "
            "positions and their first row, token types, windows)",
        )


def scores_equal_the_reference(subject: ModelSubject) -> None:
    """The logits of the labels are those of the reference; skipped for a model without a head."""
    if not callable(getattr(subject.model, "score", None)):
        raise CheckSkipped("the model has no head that classifies")
    names = list(subject.prompts)
    for name, states in zip(names, states_of(subject, names), strict=True):
        expected = subject.reference.scores(*subject.prompts[name])
        with torch.inference_mode():
            found = subject.model.score(pooled(subject, states))
        error = max_difference(found.reshape(-1), expected)
        demand(
            error < subject.tolerance,
            f"case {name!r}: the scores differ from the reference by {error:.2g}, "
            f"{subject.tolerance:g} is allowed; check the activation of the head and its pooling",
        )


def together_equals_alone(subject: ModelSubject) -> None:
    """The states of a prompt do not depend on the other prompts of a step, nor on their order."""
    names = list(subject.prompts)
    together = states_of(subject, [*reversed(names)])
    for name, found in zip(reversed(names), together, strict=True):
        (alone,) = states_of(subject, [name])
        error = max_difference(found, alone)
        demand(
            error < subject.tolerance,
            f"case {name!r}: the states differ by {error:.2g} when other prompts are computed in "
            "the same step; no row may read the rows of another prompt",
        )


CHECKS: tuple[Check, ...] = (
    builds_on_meta,
    has_what_the_engine_asks_for,
    loads_the_checkpoint,
    unknown_keys_are_refused,
    missing_keys_are_refused,
    encoding_together_equals_one_by_one,
    vectors_equal_the_reference,
    scores_equal_the_reference,
    together_equals_alone,
)
