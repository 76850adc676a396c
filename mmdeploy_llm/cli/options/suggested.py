"""Models that fit the machine, named where a demonstration is asked to do somebody's work."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

import typer

from mmdeploy_llm.cli.options.groups import is_given, is_named
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.system.portable.machine import free_ram
from mmdeploy_llm.values.options.model_names import bundled_models

LIST = Path(__file__).parents[2] / "bundled/suggested_models.json"
EXAMPLES = LIST.parents[2] / "examples"  # of a clone
NUM_NAMED = 3
GB = 10**9
PROGRAM, WEIGHT, NUM_TOKENS = 1.0, 2, 8192  # GB, bytes of a parameter, tokens in the KV cache
# What a model is wanted for, with what a demonstration lacks for that.
LACKS = {
    "photos": "not photos",
    "pages": "and reads no text",
    "vectors": "and was not trained to make vectors",
    "speech": "and hears nothing",
}

Demo = Annotated[
    bool,
    typer.Option(
        "--demo",
        rich_help_panel="Model",
        help="Take the bundled model, for drawings of shapes.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A model of the hub, and what it is good at.

    billions: its parameters. kv_bytes: of a token in the KV cache, in 16 bits."""

    name: str
    billions: float
    kv_bytes: int
    good_at: str

    @property
    def gigabytes(self) -> int:
        """The memory that it takes in 16 bits, with the program and the KV cache of some items."""
        return round(self.billions * WEIGHT + self.kv_bytes * NUM_TOKENS / GB + PROGRAM)


@cache
def suggestions(purpose: str) -> tuple[Suggestion, ...]:
    """Reads the list that lies beside the demonstrations, the smallest model first. purpose: a key
    of LACKS."""
    models = json.loads(LIST.read_text(encoding="utf-8"))[purpose]
    return tuple(Suggestion(**own) for own in models)


def suggested(memory: int, purpose: str) -> tuple[Suggestion, ...]:
    """Returns the largest models that `memory` bytes hold, or the smallest where none fits."""
    fitting = [own for own in suggestions(purpose) if own.gigabytes * GB <= memory]
    return tuple(fitting[-NUM_NAMED:]) or suggestions(purpose)[:1]


def is_demonstration(model: str) -> bool:
    """Whether a model is part of this package."""
    return model in bundled_models()


def limits_of(model: str, purpose: str) -> str:
    """Says in a sentence what a demonstration knows."""
    return f"{model} is a demonstration: it knows drawings of coloured shapes, {LACKS[purpose]}"


def note_of(model: str, purpose: str) -> str:
    """Says what a demonstration knows, and which models for this purpose fit the machine."""
    return _note(model, purpose, free_ram())


def _note(model: str, purpose: str, free: int) -> str:
    models = suggested(free, purpose)
    width = max(len(own.name) for own in models)
    rows = (f"  --model {own.name:{width}}  {own.gigabytes:2} GB, {own.good_at}" for own in models)
    title = f"{limits_of(model, purpose)}; for {purpose}, with {free // GB} GB free:"
    return "\n".join([title, *rows])


def choose_model(
    ctx: typer.Context, model: str, paths: Iterable[str], purpose: str, *, is_demo: bool | None
) -> str:
    """Returns the model of a run. Raises ConfigError where a demonstration would work on somebody's
    own files and nobody has asked for that: by its name, on the command line or in the environment,
    or by --demo, which counts more than the environment. is_demo: None of a command that no
    demonstration can do."""
    if is_demo and is_given(ctx, "model") and not is_demonstration(model):
        raise ConfigError(f"--demo and --model {model} contradict each other; give one of them")
    if is_demo and not is_demonstration(model):
        return next(iter(bundled_models()))
    if is_demo or is_named(ctx, "model"):
        return model
    if is_demo is not None and all(map(_is_example, paths)):
        return model
    free = free_ram()
    words = shlex.join([*sys.argv[1:], "--model", suggested(free, purpose)[0].name])
    lines = [
        f"which model? {_note(model, purpose, free)}",
        f"such as: mmdeploy-llm {words}",
        *([] if is_demo is None else [f"--demo takes {model} all the same"]),
    ]
    raise ConfigError("\n".join(lines))


def _is_example(path: str) -> bool:
    """Whether a path is one of the examples in a clone of this repository."""
    return Path(os.path.realpath(path)).is_relative_to(EXAMPLES)
