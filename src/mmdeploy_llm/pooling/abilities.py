"""Abilities: what a loaded model can give, read here alone from its optional attributes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mmdeploy_llm.wanted import Pooling

from .rules import NO_RULES, EmbeddingRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """Says what a model can give; see plugin_objects.model.Model for its attributes.

    can_generate: whether it has a head of its vocabulary that is trained to continue texts.
    pooling: its own; "tokens": a vector for each token; None: it is a generating model.
    can_score: whether it scores its prompt. text_length: tokens to which texts are filled with
        padding. rules: of its folder.
    """

    can_generate: bool = True
    is_bidirectional: bool = False
    pooling: Pooling | Literal["tokens"] | None = None
    can_score: bool = False
    text_length: int | None = None
    rules: EmbeddingRules = NO_RULES

    @property
    def can_embed(self) -> bool:
        """Whether vectors of it have a meaning: a model that only scores has none."""
        return self.can_generate or self.gives_vectors

    @property
    def gives_vectors(self) -> bool:
        """Whether it was made for vectors."""
        return (self.pooling or self.rules.pooling) is not None


GENERATES = Abilities()  # what an ordinary model can give


def abilities_of(model: Any, rules: EmbeddingRules) -> Abilities:
    """Returns what a Model can give. rules: of its folder."""
    is_bidirectional = bool(getattr(model, "is_bidirectional", False))
    return Abilities(
        can_generate=not (is_bidirectional or getattr(model, "is_embedder", False)),
        is_bidirectional=is_bidirectional,
        pooling=getattr(model, "default_pooling", None),
        can_score=callable(getattr(model, "score", None)) or rules.score_tokens is not None,
        text_length=getattr(model, "text_length", None),
        rules=rules,
    )
