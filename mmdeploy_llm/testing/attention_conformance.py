"""The pytest class that runs the checks of attention backends."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from mmdeploy_llm.hooks import AttentionBackendSpec
from mmdeploy_llm.testing.attention import backends
from mmdeploy_llm.testing.attention.subject import BackendSubject

from .conformance import Conformance


class AttentionBackendConformance(Conformance):
    """Tests an attention backend on random steps, against plain attention in float64.

    spec: the backend. What it does not declare must be refused.
    tolerance: largest allowed difference, absolute and relative; None: what rounding of the dtype
        explains, 2e-5 in float32, 4e-3 in float16, 3e-2 in bfloat16.
    make: override it to build the backend otherwise than an engine does, such as for an
        interpreter on the CPU; it is called with an AttentionSetup.
    """

    checks = backends.CHECKS
    spec: ClassVar[AttentionBackendSpec]
    tolerance: ClassVar[float | None] = None
    make: ClassVar[Any] = None

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls) -> BackendSubject:
        """The argument of the checks; `subject.new(dtype)` builds a backend."""
        return BackendSubject(spec=cls.spec, tolerance=cls.tolerance, make=cls.make)
