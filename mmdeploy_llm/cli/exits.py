"""Exit codes of the program, and how it words and prints an error: options are named as the person
has to write them, `on_existing` is --on-existing.

The library names its arguments, which are the names of options with underscores. A name counts
where it can be nothing else: one with an underscore, one after the name of the class that has it,
the first words of a message, and what a message says to give. What is quoted stays, and so does
what is said of Python.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

import typer

SOME_FAILED, USAGE, STOPPED, SOME_LACKING = 1, 2, 3, 4


def print_error(message: str) -> None:
    """Prints one red line on standard error."""
    from mmdeploy_llm.cli.terminal.letters import printable

    typer.secho(f"error: {printable(on_the_command_line(message))}", fg="red", err=True)


def on_the_command_line(message: str) -> str:
    """Returns a message with arguments that are dicts as --engine takes them, such as
    limit_mm_per_prompt={'image': 3}: as JSON, in quotes for a shell."""
    return _DICT.sub(lambda found: f"--engine '{found[1]}={_json(found[2])}'", message)


def _json(literal: str) -> str:
    try:
        return json.dumps(ast.literal_eval(literal))
    except (ValueError, SyntaxError):  # it is no dict, as it stands
        return literal


_DICT = re.compile(r"(?<![\w.'\"=\-])([a-z]+(?:_[a-z]+)+)=(\{[^{}]*\})")
_STAYS = r"(?<!\w)'[^']*'(?!\w)|\"[^\"]*\"|\(in Python[^()]*(?:\([^()]*\)[^()]*)*\)"
_NAME = r"(?<![\w./=\-]){}(?![\w/=(\[]|\.\w|-\w)"
_OF_CLASS = r"(?<![\w.])(?:EngineConfig|SamplingParams|sampling_params)\.(?P<of_class>\w+)"
_VERBS = "is|are|must|needs?|has|have|fits|contradict|guides|cannot"


def in_options(message: str, command: Any) -> str:
    """Returns the message of a ConfigError with the options of the command, None for no command."""
    options = options_of(command)
    if not options:
        return message
    plain = "|".join(sorted(map(re.escape, options), key=len, reverse=True))
    first = re.compile(rf"(?:(?:{plain})(?:, | and )?)+(?= (?:{_VERBS})\b)")
    found = first.match(message)
    begin = found.end() if found else 0
    head = re.sub(rf"\b(?:{plain})\b", lambda name: options[name[0]], message[:begin])
    long = "|".join(name for name in options if "_" in name) or r"(?!)"
    names = re.compile(
        rf"(?P<stays>{_STAYS})|{_OF_CLASS}|{_NAME.format(rf'(?P<long>{long})')}"
        rf"|\b(?P<verb>needs|give|only with) (?P<wanted>{plain})(?=[,:;.]| too\b| and\b|$)"
    )
    return head + names.sub(lambda match: _named(match, options), message[begin:])


def options_of(command: Any) -> Mapping[str, str]:
    """Returns the options of a command by the names of their arguments."""
    return {
        str(param.name): next(name for name in param.opts if name.startswith("--"))
        for param in getattr(command, "params", ())
        if any(name.startswith("--") for name in param.opts)
    }


def _named(match: re.Match[str], options: Mapping[str, str]) -> str:
    if match["stays"]:
        return match[0]
    if own := match["of_class"]:
        return options.get(own, match[0])
    if match["verb"]:
        return f"{match['verb']} {options[match['wanted']]}"
    return options[match["long"]]
