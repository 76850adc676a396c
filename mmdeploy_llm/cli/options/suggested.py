"""Models for photos that fit the machine, named where a demonstration is asked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mmdeploy_llm.system.portable.machine import free_ram
from mmdeploy_llm.values.options.model_names import bundled_models

LIST = Path(__file__).parents[2] / "bundled/models_for_photos.json"
NUM_NAMED = 3
GB = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A model of the hub, the GB of memory that it takes in 16 bits with its KV cache, and what it
    is good at."""

    name: str
    gigabytes: int
    good_at: str


@cache
def suggestions() -> tuple[Suggestion, ...]:
    """Reads the list that lies beside the demonstrations, the smallest model first."""
    return tuple(Suggestion(**own) for own in json.loads(LIST.read_text(encoding="utf-8")))


def suggested(memory: int) -> tuple[Suggestion, ...]:
    """Returns the largest models that `memory` bytes hold, or the smallest where none fits."""
    fitting = [own for own in suggestions() if own.gigabytes * GB <= memory]
    return tuple(fitting[-NUM_NAMED:]) or suggestions()[:1]


def is_demonstration(model: str) -> bool:
    """Whether a model is part of this package."""
    return model in bundled_models()


def limits_of(model: str) -> str:
    """Says in a sentence what a demonstration knows."""
    return f"{model} is a demonstration: it knows drawings of coloured shapes, not photos"


def note_of(model: str) -> str:
    """Says what a demonstration knows, and which models for photos fit this machine."""
    free = free_ram()
    width = max(len(own.name) for own in suggestions())
    lines = [
        f"  --model {own.name:{width}}  {own.gigabytes:2} GB, {own.good_at}"
        for own in suggested(free)
    ]
    return "\n".join([f"{limits_of(model)}; for photos, with {free // GB} GB free:", *lines])
