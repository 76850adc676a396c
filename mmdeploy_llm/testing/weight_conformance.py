"""WeightFormatConformance: a pytest class that runs the checks of a format of quantised weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from mmdeploy_llm.hooks import WeightFormatSpec
from mmdeploy_llm.testing.weights import products, reading
from mmdeploy_llm.testing.weights.subject import (
    SHAPES,
    Quantise,
    Reference,
    WeightFormatSubject,
)

from .conformance import Conformance


class WeightFormatConformance(Conformance):
    """Tests a format of quantised weights on weights that it quantises, or on a checkpoint.

    spec: the format.
    quantise: as a staticmethod, called with float32 [n, k]; returns the tensors of the weight by
        suffix, and the settings. Raises ValueError for a shape that the format has not. None: what
        the spec names.
    folder: a checkpoint of the format, of 64 MiB at most. Tried beside what is quantised, or
        without `quantise` alone.
    reference: as a staticmethod, called with stored tensors by key and settings; returns the
        dequantised weights by key, as the library that owns the format computes them.
    error: the largest error of a weight that was quantised and read again, relative to its size.
    shapes: [n, k] of weights that are quantised.
    ignores_unknown_settings: True where another program adds notes to the settings.
    """

    checks = reading.CHECKS + products.CHECKS
    spec: ClassVar[WeightFormatSpec]
    quantise: ClassVar[Quantise | None] = None
    folder: ClassVar[Path | None] = None
    reference: ClassVar[Reference | None] = None
    error: ClassVar[float] = 0.1
    shapes: ClassVar[Sequence[tuple[int, int]]] = SHAPES
    ignores_unknown_settings: ClassVar[bool] = False

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls) -> WeightFormatSubject:
        """The argument of the checks."""
        return WeightFormatSubject(
            spec=cls.spec,
            quantise=cls.quantise,
            folder=cls.folder,
            reference=cls.reference,
            error=cls.error,
            shapes=cls.shapes,
            ignores_unknown_settings=cls.ignores_unknown_settings,
        )
