"""Values of options: NAME=VALUE, files of JSON, and arguments of LLM and its calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mmdeploy_llm.errors import ConfigError

if TYPE_CHECKING:
    from mmdeploy_llm.params import SamplingParams

MANY_MEDIA = {"image": 16, "video": 4}  # default limit of media items per prompt


def template_kwargs(thinking: bool | None) -> dict[str, Any]:
    """Returns the variables for the chat template."""
    return {} if thinking is None else {"enable_thinking": thinking}


def sampling_params(values: Mapping[str, Any]) -> SamplingParams:
    """Builds SamplingParams of those values that are not None; imports pydantic only now."""
    from mmdeploy_llm.params import SamplingParams

    return SamplingParams(**{name: value for name, value in values.items() if value is not None})


def engine_options(ctx: typer.Context, extra: list[str] | None, **options: Any) -> dict[str, Any]:
    """Returns the options of LLM(): the given ones without None, overridden by the NAME=VALUE
    texts of --engine and by the plugins that the environment selects (`ctx.obj`)."""
    parsed = dict(named_value("--engine", text, "max_model_len=4096") for text in extra or [])
    for name in ("reasoning_parser", "tool_call_parser"):
        if options.get(name) == "none":
            options[name] = None
    merged = {**options, **parsed, **ctx.obj}
    return {name: value for name, value in merged.items() if value is not None}


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


def named_values(option: str, text: str, example: str) -> dict[str, Any]:
    """Parses NAME=VALUE, a JSON object, or a file with one. Raises ConfigError."""
    name = text.partition("=")[0]
    if not text.lstrip().startswith("{") and "=" in text and name.isidentifier():
        return dict([named_value(option, text, example)])
    try:
        source = text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8")
        values = json.loads(source)
    except FileNotFoundError:
        raise ConfigError(
            f"{option} {text!r} must be NAME=VALUE, such as {example}, a JSON object or a file "
            "with one; there is no such file"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{option} {text[:80]!r} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{option} {text[:80]!r} holds no JSON object")
    return values


def read_tools(path: Path | None) -> Any:
    """Reads the JSON file of --tools; None without one. Raises ConfigError if it is not JSON."""
    if path is None:
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tools {str(path)!r} cannot be read as JSON: {error}") from error
