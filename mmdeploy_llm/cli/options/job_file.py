"""Job files: `mmdeploy-llm run job.toml` does what a command line does; --save-job writes one.

A job is a TOML table. `command` names the command; every other key is an argument or option of it,
by its name; `folder` is where it runs, relative to the job's own folder, which is the default: so
paths in a job mean the same from wherever it is run.

    command = "caption"
    paths = ["photos"]
    prompt = "@question.txt"
    max_tokens = 200
    engine = {max_model_len = 4096}
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import typer

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.values.text.encodings import not_utf8

from .groups import is_named

COMMAND, FOLDER, SAVE = "command", "folder", "save_job"
MAX_BYTES = 10_000_000
HEAD = "# mmdeploy-llm run {name}\n"


def has_jobs(command: Any) -> bool:
    """Returns whether a command can be written into a job file."""
    return any(param.name == SAVE for param in command.params)


def read_job(path: str) -> dict[str, Any]:
    """Reads a job file. Raises ConfigError for what is none."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the job {path!r} cannot be read: {error}") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"the job {path!r} is larger than {MAX_BYTES} bytes")
    try:
        values = tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ConfigError(f"the job {path!r} is {not_utf8(data)}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the job {path!r} is not TOML: {error}") from error
    if COMMAND not in values:
        raise ConfigError(f'the job {path!r} has no command; write command = "caption"')
    return values


def all_words(command: Any, parent: Any, job: Mapping[str, Any], more: list[str]) -> list[str]:
    """Returns the words of a job and those that follow its file, which replace options of it.
    Raises ConfigError for keys that name nothing and for values that are no option's."""
    with command.context_class(command, parent=parent) as ctx:
        params = {each.name: each for each in command.get_params(ctx) if each.name != SAVE}
        found, _, replaced = command.make_parser(ctx).parse_args(args=[*more])
    if any(found.get(name) for name, each in params.items() if each.param_type_name == "argument"):
        raise ConfigError(f"{' '.join(more)}: only options can follow the job; edit its arguments")
    options, arguments = [], []
    seen = set()
    for key, value in job.items():
        name = key.replace("-", "_")
        param = params.get(name)
        if param is None:
            near = difflib.get_close_matches(name, params, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(params))}"
            raise ConfigError(f"{key!r} is no option of this command; {hint}")
        if name in seen:
            raise ConfigError(f"{name} is given twice, as {name!r} and with hyphens")
        seen.add(name)
        if param.param_type_name == "argument":
            arguments += _texts(key, value)
        elif param not in replaced:
            options += _option_words(param, key, value)
    return [*options, *more, "--", *arguments]


def _option_words(param: Any, key: str, value: Any) -> list[str]:
    name = max(param.opts, key=len)
    if param.is_flag:
        if not isinstance(value, bool):
            raise ConfigError(f"{key} must be true or false, got {value!r}")
        return [name] if value else list(param.secondary_opts[:1])
    if not param.multiple and isinstance(value, (list, dict)):
        raise ConfigError(f"{key} must be one value, got {value!r}")
    return [f"{name}={text}" for text in _texts(key, value)]


def _texts(key: str, value: Any) -> list[str]:
    """Returns a value as the texts that the command line has for it."""
    if isinstance(value, dict):
        return [f"{name}={_json_text(key, own)}" for name, own in value.items()]
    values = value if isinstance(value, list) else [value]
    for each in values:
        if isinstance(each, bool) or not isinstance(each, (str, int, float)):
            raise ConfigError(f"{key} must be a text or a number, or a list of them, got {each!r}")
    return [str(each) for each in values]


def _json_text(key: str, value: Any) -> str:
    """Returns the text after NAME= that is read as this value."""
    if not isinstance(value, str):
        try:
            return json.dumps(value)
        except TypeError as error:
            raise ConfigError(f"{key}: {value!r} is no value of JSON") from error
    try:
        json.loads(value)
    except ValueError:
        return value
    return json.dumps(value)  # a text that looks like a number


def save_job(ctx: typer.Context, path: Path | None) -> None:
    """Writes the command that runs into a job file, if one is wanted. Raises ConfigError for a
    file that exists and is no job."""
    if path is None:
        return
    if os.path.lexists(path):
        read_job(str(path))
    folder = os.path.relpath(os.getcwd(), os.path.abspath(path.parent))
    lines = [f"{COMMAND} = {_toml(ctx.info_name)}"]
    lines += [] if folder == "." else [f"{FOLDER} = {_toml(folder)}"]
    lines += [f"{name} = {_toml(value)}" for name, value in given_values(ctx)]
    try:
        path.write_text(HEAD.format(name=path.name) + "\n".join(lines) + "\n", encoding="utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"the job {str(path)!r} cannot hold a name that is no Unicode") from error
    except OSError as error:
        raise ConfigError(f"the job {str(path)!r} cannot be written: {error}") from error


def given_values(ctx: typer.Context) -> Iterator[tuple[str, Any]]:
    """Yields the names and values that the command line or the environment has given, in the order
    of --help."""
    for param in ctx.command.get_params(ctx):
        if is_named(ctx, param.name or "") and param.name != SAVE:
            yield str(param.name), ctx.params[str(param.name)]


def _toml(value: Any) -> str:
    """Returns a value in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    text = str(value.value if isinstance(value, Enum) else value)
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
