"""Values of options: NAME=VALUE, files of JSON, and arguments of LLM and its calls."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.values.text.encodings import is_utf8, not_utf8

from .groups import is_given

if TYPE_CHECKING:
    from mmdeploy_llm.values.params import SamplingParams

MANY_MEDIA = {"image": 16, "video": 4, "audio": 4}  # default limit of media items per prompt
MAX_TEXT = 1_000_000  # characters of a file with a text
ANY_MODEL = "shapes-vl"  # options are checked without reading the model
FROM_ENVIRONMENT = f"{__name__}.environment"  # key of engine options in the context's meta


def template_kwargs(thinking: bool | None) -> dict[str, Any]:
    """Returns the variables for the chat template."""
    return {} if thinking is None else {"enable_thinking": thinking}


def sampling_params(values: Mapping[str, Any]) -> SamplingParams:
    """Builds SamplingParams of those values that are not None; imports pydantic only now."""
    from mmdeploy_llm.values.params import SamplingParams

    return SamplingParams(**{name: value for name, value in values.items() if value is not None})


def text_value(option: str, text: str | None) -> str | None:
    """Returns the text of an option: "@FILE" is what the file holds, "-" what standard input holds,
    and "@@..." a text that begins with @. Raises ConfigError for a file that is no text."""
    if text == "":
        raise ConfigError(f"{option} has no text; give one, of a model that needs none a space")
    if text is None or not text.startswith(("@", "-")) or text.startswith("@@"):
        return text if text is None else text.removeprefix("@")
    if text == "-":
        given = sys.stdin.read(MAX_TEXT + 1).removeprefix("\ufeff")
        if not is_utf8(given):
            raise ConfigError(f"{option}: standard input is {not_utf8(given)}")
        return _not_empty(option, text, given)
    if text.startswith("-"):
        return text
    return read_text(option, text[1:], "; a text that begins with @ is written with @@")


def read_text(option: str, path: str, hint: str = "") -> str:
    """Reads the text that a file holds, without the ends of lines after it. Raises ConfigError."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            return _not_empty(option, path, file.read(MAX_TEXT + 1))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option}: the file {path!r} is {not_utf8(error.object)}") from None
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{option}: the file {path!r} cannot be read: {why}{hint}") from error


def _not_empty(option: str, source: str, text: str) -> str:
    if len(text) > MAX_TEXT:
        raise ConfigError(f"{option}: {source!r} has more than {MAX_TEXT} characters")
    if not text.strip():
        raise ConfigError(f"{option}: {source!r} has no text")
    return text.rstrip("\r\n")


def named_values(option: str, texts: Iterable[str], example: str) -> dict[str, Any]:
    """Parses every text, NAME=VALUE, a JSON object or a file with one, into one dict.

    Raises ConfigError for another text, and for a name that is given twice.
    """
    found: dict[str, Any] = {}
    for text in texts:
        for name, value in _pairs(option, text, example):
            if name in found:
                raise ConfigError(f"{option} gives {name} twice; give it once")
            found[name] = value
    return found


def _pairs(option: str, text: str, example: str) -> Iterable[tuple[str, Any]]:
    is_file = "=" not in text and (text.endswith(".json") or os.path.isfile(text))
    if not is_file and not text.startswith(("{", "@")):
        return [named_value(option, text, example)]
    whole = text if text.startswith("{") else read_text(option, text.removeprefix("@"))
    try:
        values = json.loads(whole)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{option}: {text[:80]!r} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{option}: {text[:80]!r} must hold a JSON object, {{NAME: VALUE, ...}}")
    return [(name.replace("-", "_"), value) for name, value in values.items()]


def engine_options(ctx: typer.Context, extra: list[str] | None, **options: Any) -> dict[str, Any]:
    """Returns the options of LLM(): those of the environment, overridden by the given ones without
    None, the NAME=VALUE texts of --engine and the plugins that the environment selects
    (`ctx.obj`). Raises ConfigError where one is wrong."""
    parsed = named_values("--engine", extra or [], "max_model_len=4096")
    for name in parsed:
        if is_given(ctx, name):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} and --engine {name}=... contradict each other; give one")
    for name in ("reasoning_parser", "tool_call_parser"):
        if options.get(name) == "none":
            options[name] = None
    merged = {**ctx.meta.get(FROM_ENVIRONMENT, {}), **options, **parsed, **ctx.obj}
    found = {name: value for name, value in merged.items() if value is not None}
    from mmdeploy_llm.values.options.config import EngineConfig  # which imports all of pydantic

    EngineConfig.from_options(ANY_MODEL, found)  # a wrong one is told before more is imported
    return found


def named_value(option: str, text: str, example: str) -> tuple[str, Any]:
    """Parses NAME=VALUE; the value is read as JSON if it is JSON, else as text.

    Raises ConfigError without a name or "=". `option` and `example` are for its message.
    """
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ConfigError(f"{option} {text!r} must be NAME=VALUE, such as {example}")
    try:
        return name.replace("-", "_"), json.loads(value)
    except ValueError:
        return name.replace("-", "_"), value


def read_tools(path: Path | None) -> Any:
    """Reads the JSON file of --tools; None without one. Raises ConfigError if it is not JSON."""
    if path is None:
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tools {str(path)!r} cannot be read as JSON: {error}") from error
