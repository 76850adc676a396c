"""Abilities: what a loaded model can give, read here alone from its optional attributes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mmdeploy_llm.values.pooling_request import Pooling, PoolingRequest, What

from .rules import NO_RULES, EmbeddingRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """Says what a model can give; see hooks.objects.model.Model for its attributes.

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

    def instruction_of(self, wanted: PoolingRequest) -> str | None:
        """Returns the instruction of a request, of a document that has none the folder's."""
        is_open = wanted.is_document and wanted.instruction is None
        return self.rules.document_prompt if is_open else wanted.instruction

    @property
    def gives_vectors(self) -> bool:
        """Whether it was made for vectors. A head that scores has a pooling of its own."""
        own = None if self.can_score else self.pooling
        return (self.rules.pooling or own) is not None

    @property
    def trial(self) -> PoolingRequest | None:
        """Says what made-up requests want that warm an engine up; None: text."""
        if self.can_generate:
            return None
        what: What = "vector" if self.gives_vectors else "score"
        return PoolingRequest(what=what, pooling="last", normalize=False)


GENERATES = Abilities()  # what an ordinary model can give


def is_bidirectional(model: Any) -> bool:
    """Whether the tokens of a Model attend in both directions, each prompt in one step."""
    return bool(getattr(model, "is_bidirectional", False))


def has_whole_prompts(model: Any) -> bool:
    """Whether a prompt of a Model is computed in one step, and is like no part of another one."""
    return is_bidirectional(model) or bool(getattr(model, "sees_prompts", False))


def abilities_of(model: Any, rules: EmbeddingRules = NO_RULES) -> Abilities:
    """Returns what a Model can give. rules: of its folder."""
    is_encoder = is_bidirectional(model)
    return Abilities(
        can_generate=not (is_encoder or getattr(model, "is_embedder", False)),
        is_bidirectional=is_encoder,
        pooling=getattr(model, "default_pooling", None),
        can_score=callable(getattr(model, "score", None)) or rules.score_tokens is not None,
        text_length=getattr(model, "text_length", None),
        rules=rules,
    )
