"""Models for photos that fit the machine, named where a demonstration is asked."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import typer

from mmdeploy_llm.cli.options.groups import is_given, is_named
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.system.portable.machine import free_ram
from mmdeploy_llm.values.options.model_names import bundled_models

LIST = Path(__file__).parents[2] / "bundled/models_for_photos.json"
EXAMPLES = LIST.parents[2] / "examples"  # of a clone
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
    return "\n".join(
        [f"{limits_of(model)}; for photos, with {free // GB} GB free:", *_table(suggested(free))]
    )


def chosen(ctx: typer.Context, model: str, paths: Iterable[str], *, is_demo: bool) -> str:
    """Returns the model of a run. Raises ConfigError where a demonstration would caption somebody's
    own files and nobody has asked for that: by its name, on the command line or in the environment,
    or by --demo, which counts more than the environment."""
    if is_demo and is_given(ctx, "model") and not is_demonstration(model):
        raise ConfigError(f"--demo and --model {model} contradict each other; give one of them")
    if is_demo and not is_demonstration(model):
        return next(iter(bundled_models()))
    if is_demo or is_named(ctx, "model") or all(map(_is_example, paths)):
        return model
    free = free_ram()
    models = suggested(free)
    words = shlex.join([*sys.argv[1:], "--model", models[0].name])
    lines = [
        f"which model? {limits_of(model)}. For photos, with {free // GB} GB free:",
        *_table(models),
        f"such as: mmdeploy-llm {words}",
        f"--demo takes {model} all the same",
    ]
    raise ConfigError("\n".join(lines))


def _table(models: Iterable[Suggestion]) -> list[str]:
    width = max(len(own.name) for own in suggestions())
    return [f"  --model {own.name:{width}}  {own.gigabytes:2} GB, {own.good_at}" for own in models]


def _is_example(path: str) -> bool:
    """Whether a path is one of the examples in a clone of this repository."""
    return Path(os.path.realpath(path)).is_relative_to(EXAMPLES)
