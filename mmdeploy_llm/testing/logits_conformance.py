"""The pytest class that runs the checks of logits processors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest

from mmdeploy_llm.hooks import LogitsProcessorSpec
from mmdeploy_llm.testing.plugins import logits
from mmdeploy_llm.testing.tiny import make_tokenizer

from .conformance import Conformance


class LogitsProcessorConformance(Conformance):
    """Tests a logits processor on random logits and requests, and on examples.

    spec: the processor.
    arguments: some that it accepts, each of which is tried. wrong_arguments: some that it refuses.
    examples: logits before and after.
    texts: outputs after which it acts, as texts or token ids.
    """

    checks = logits.CHECKS
    spec: ClassVar[LogitsProcessorSpec]
    arguments: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    wrong_arguments: ClassVar[Sequence[Mapping[str, Any]]] = ()
    examples: ClassVar[Sequence[logits.LogitsExample]] = ()
    texts: ClassVar[Sequence[str | Sequence[int]]] = ()

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls) -> logits.LogitsProcessorSubject:
        """The argument of the checks; `subject.new()` builds a processor."""
        return logits.LogitsProcessorSubject(
            spec=cls.spec,
            arguments=tuple(cls.arguments),
            wrong_arguments=tuple(cls.wrong_arguments),
            examples=tuple(cls.examples),
            texts=tuple(cls.texts),
            new_tokenizer=make_tokenizer,
        )
