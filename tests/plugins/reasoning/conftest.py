"""Builds and runs the parsers by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from mmdeploy_llm_plugins import reasoning

from mmdeploy_llm.hooks import ReasoningParser
from mmdeploy_llm.testing.plugins.parsers import ParserSubject

SPECS = {spec.name: spec for spec in reasoning.provide_reasoning_parsers()}


@pytest.fixture(scope="session")
def new_parser() -> Callable[[str], ReasoningParser]:
    """Makes a parser by name."""
    return lambda name: ParserSubject(spec=SPECS[name]).new()


@pytest.fixture(scope="session")
def parse() -> Callable[..., tuple[str, str]]:
    """Returns (reasoning, content) of a text that arrives in pieces, by the name of the parser."""
    return lambda name, *pieces, prompt="": ParserSubject(spec=SPECS[name]).split(pieces, prompt)
