"""Abilities: what a loaded model can give, read here alone from its optional attributes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mmdeploy_llm.wanted import Pooling


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """Says what a model can give; see plugin_objects.model.Model for its attributes.

    can_generate: whether it has a head of its vocabulary that is trained to continue texts.
    pooling: its own; "tokens": a vector for each token; None: it is a generating model.
    can_score: whether it scores its prompt.
    """

    can_generate: bool = True
    is_bidirectional: bool = False
    pooling: Pooling | Literal["tokens"] | None = None
    can_score: bool = False


def abilities_of(model: Any) -> Abilities:
    """Returns what a Model can give."""
    is_bidirectional = bool(getattr(model, "is_bidirectional", False))
    return Abilities(
        can_generate=not (is_bidirectional or getattr(model, "is_embedder", False)),
        is_bidirectional=is_bidirectional,
        pooling=getattr(model, "default_pooling", None),
        can_score=callable(getattr(model, "score", None)),
    )
