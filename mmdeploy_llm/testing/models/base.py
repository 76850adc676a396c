"""Defines checks: functions that take a subject and raise CheckFailed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mmdeploy_llm.hooks import ReasoningParserSpec, ToolParserSpec
from mmdeploy_llm.hooks.factories import imported
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.hooks.records import FactorySpec
from mmdeploy_llm.hooks.versions import WRITTEN_FOR

# A check is named after its function; the first line of its docstring states the requirement.
Check = Callable[[Any], str | None]


class CheckFailed(AssertionError):
    """A plugin breaks its contract. The message says what was found and what to do."""


class CheckSkipped(Exception):
    """A check does not apply or lacks an input. The message says why."""


def since(major: int, minor: int) -> Callable[[Check], Check]:
    """Says with which version of the plugin API a check came: a package that was written for an
    older one fails it in `plugins check`, and its own pytest runs go on as they did."""

    def mark(check: Check) -> Check:
        check.__dict__["since"] = (major, minor)
        return check

    return mark


def newer_than(version: tuple[int, int] | None, declared: tuple[int, int] | None) -> str:
    """Says that a check of a version of the plugin API is newer than what a package declares; ""
    where it is not."""
    if version is None or (declared is not None and version <= declared):
        return ""
    number = ".".join(map(str, version))
    own = "no version" if declared is None else ".".join(map(str, declared))
    return (
        f"since API {number}; your package declares {own} ({WRITTEN_FOR} = {version} in the "
        "plugin's module declares that it passes)"
    )


def demand(condition: object, message: str) -> None:
    """Raises CheckFailed with `message` unless `condition` holds."""
    if not condition:
        raise CheckFailed(message)


@contextmanager
def attributed(doing: str, advice: str) -> Iterator[None]:
    """Converts an exception inside the block to a CheckFailed that names the action `doing` and
    the advice."""
    try:
        yield
    except (CheckFailed, CheckSkipped):
        raise
    except (Exception, SystemExit) as error:
        raise CheckFailed(f"{doing} raised {error_text(error)}; {advice}") from error


def new_parser(spec: ReasoningParserSpec | ToolParserSpec, base: type[Any]) -> Any:
    """Builds a parser for one request. Raises CheckFailed when it is not a `base`."""
    factory = factory_of(spec)
    with attributed(
        f"{spec.factory}()", "a parser's factory is called without arguments, per request"
    ):
        parser = factory()
    demand(
        isinstance(parser, base),
        f"{spec.factory}() returns a {type(parser).__name__}; derive it from "
        f"mmdeploy_llm.hooks.{base.__name__}",
    )
    return parser


def factory_of(spec: FactorySpec) -> Callable[..., Any]:
    """Imports the factory that the spec names. Raises CheckFailed when that fails."""
    with attributed(
        f"importing the factory {spec.factory!r} of {spec.name!r}",
        'correct the spec\'s `factory` ("module:Class"), or the module',
    ):
        return imported(spec.factory)  # type: ignore[no-any-return]
