"""Builds the parsers by name, through the plugin's own hook."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from operator import attrgetter

import pytest
from mmdeploy_llm_plugins import reasoning

from mmdeploy_llm.hooks import ReasoningParser

Parse = Callable[..., tuple[str, str]]


def make_parser(name: str) -> ReasoningParser:
    """Builds a parser by its name."""
    spec = {spec.name: spec for spec in reasoning.provide_reasoning_parsers()}[name]
    module, _, attributes = spec.factory.partition(":")
    parser: ReasoningParser = attrgetter(attributes)(importlib.import_module(module))()
    return parser


def run(name: str, *pieces: str, prompt: str = "") -> tuple[str, str]:
    """Returns (reasoning, content) of a text that arrives in pieces."""
    parser = make_parser(name)
    parser.start(prompt)
    segments = [segment for piece in pieces for segment in parser.feed(piece)]
    segments += parser.finish()
    assert all(segment.text for segment in segments)
    return tuple(
        "".join(segment.text for segment in segments if segment.kind == kind)
        for kind in ("reasoning", "content")
    )


@pytest.fixture(scope="session")
def new_parser() -> Callable[[str], ReasoningParser]:
    """Makes a parser by name."""
    return make_parser


@pytest.fixture(scope="session")
def parse() -> Parse:
    """Runs a parser by name over pieces of text."""
    return run
