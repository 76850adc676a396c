"""Knows the names that transformers gives to one decoder with different heads: XForCausalLM, XModel
without a head, XForSequenceClassification with one of labels."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

HeadKind = Literal["words", "none", "labels"]
GENERATING = ("ForConditionalGeneration", "ForCausalLM")
LABELS = "ForSequenceClassification"
# The end of a name -> those of its generating relatives, best first. The model of a family with
# media is XModel, that of its texts XTextModel.
ENDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (f"Text{LABELS}", GENERATING[1:]),
    (LABELS, GENERATING),
    ("TextModel", GENERATING[1:]),
    ("Model", GENERATING),
)


def relatives(architecture: str) -> tuple[str, ...]:
    """Returns the names that the same decoder may have with an output head; () for a name that is
    none of a decoder without one."""
    for end, others in ENDS:
        if architecture.endswith(end):
            stem = architecture.removesuffix(end)
            return tuple(stem + other for other in others)
    return ()


def head_of(architecture: str, served: Collection[str]) -> HeadKind:
    """Returns the head of a checkpoint of `architecture`, for a model that serves the names
    `served`: the model's own, "words", unless it serves a relative only."""
    if architecture in served or not set(relatives(architecture)) & set(served):
        return "words"
    return "labels" if architecture.endswith(LABELS) else "none"
