"""What a check is: a function that takes a subject and raises CheckFailed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mmdeploy_llm.hooks import ReasoningParserSpec, ToolParserSpec
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.hooks.records import Spec

# A check's name is its function's; the first line of its docstring says what it demands.
Check = Callable[[Any], None]


class CheckFailed(AssertionError):
    """A plugin breaks its contract; the message says what was found and what to do."""


class CheckSkipped(Exception):
    """A check does not apply, or lacks what it needs; the message says why."""


def demand(condition: object, message: str) -> None:
    """Raises CheckFailed with `message` unless `condition` holds."""
    if not condition:
        raise CheckFailed(message)


@contextmanager
def attributed(doing: str, advice: str) -> Iterator[None]:
    """An exception inside becomes a CheckFailed that says what was being done, and the advice."""
    try:
        yield
    except (CheckFailed, CheckSkipped):
        raise
    except (Exception, SystemExit) as error:
        raise CheckFailed(f"{doing} raised {error_text(error)}; {advice}") from error


def new_parser(spec: ReasoningParserSpec | ToolParserSpec, base: type[Any]) -> Any:
    """A parser for one request. Raises CheckFailed when the factory does not give a `base`."""
    factory = factory_of(spec)
    with attributed(
        f"{spec.factory}()", "a parser's factory is called without arguments, per request"
    ):
        parser = factory()
    demand(
        isinstance(parser, base),
        f"{spec.factory}() gives a {type(parser).__name__}; derive it from "
        f"mmdeploy_llm.hooks.{base.__name__}",
    )
    return parser


def factory_of(spec: Spec) -> Callable[..., Any]:
    """What the spec's factory names. Raises CheckFailed when it cannot be imported."""
    module, _, attributes = spec.factory.partition(":")
    with attributed(
        f"importing the factory {spec.factory!r} of {spec.name!r}",
        'correct the spec\'s `factory` ("module:Class"), or the module',
    ):
        found: Any = importlib.import_module(module)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
        return found  # type: ignore[no-any-return]
