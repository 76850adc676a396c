"""EmbedderConformance: a pytest class that runs the checks of a model for vectors or scores.

class TestMyEncoder(EmbedderConformance):
    spec = provide_models()[0]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from mmdeploy_llm.hooks import MediaSpan
from mmdeploy_llm.testing.models import embedders
from mmdeploy_llm.testing.models.models import Grid
from mmdeploy_llm.testing.models.prompts import make_prompt

from .model_conformance import ModelConformance

# Prompts of several lengths, one of a single token.
CASES: Mapping[str, Sequence[Grid]] = MappingProxyType(
    {"text": (), "other text": (), "one token": (), "part of a text": ()}
)
LENGTHS: Mapping[int, int] = MappingProxyType({2: 1, 3: 7})  # seed -> tokens


class EmbedderConformance(ModelConformance):
    """Tests a model family that gives vectors or scores and cannot generate; see ModelConformance
    for the fields and what may be overridden. The reference has `vectors(ids, media)`: the vector
    of a prompt [size], or what `embedding` makes of the states of all tokens, or these themselves;
    and `scores(ids, media)`."""

    checks = embedders.CHECKS
    cases: ClassVar[Mapping[str, Sequence[Grid]]] = CASES

    @staticmethod
    def make_prompt(
        config: Any, grids: Sequence[Grid], *, seed: int = 0
    ) -> tuple[list[int], list[MediaSpan]]:
        """Returns token ids and media of one case."""
        ids, media = make_prompt(config, grids, seed=seed)
        return (ids, media) if media else (ids[: LENGTHS.get(seed, len(ids))], media)

    @staticmethod
    def make_reference(folder: Path) -> Any:
        """Returns transformers' model."""
        return embedders.EmbedderReference(folder)
