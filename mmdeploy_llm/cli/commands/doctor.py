"""The command `doctor`, which examines this machine."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from mmdeploy_llm.cli import cache_option
from mmdeploy_llm.cli.exits import SOME_FAILED

if TYPE_CHECKING:
    from mmdeploy_llm.cli.doctor import Finding

MARKS = {"good": ("ok", "green"), "slow": ("slow", "yellow"), "absent": ("-", "dim")}
MARKS["bad"] = ("WRONG", "bold red")

DOCTOR_EPILOG = """\b
Marks:
  ok     works
  slow   works, and could be faster; the line after it says how
  -      not there, and not needed unless you want what it is for
  WRONG  does not work; the exit code is 1

\b
Examples:
  mmdeploy-llm doctor
  mmdeploy-llm doctor --no-self-test
  mmdeploy-llm doctor --json > doctor.json     to send along with a question"""

SelfTest = Annotated[
    bool,
    typer.Option(
        "--self-test/--no-self-test",
        help="Whether to compare tiny models with transformers, which takes some seconds.",
    ),
]
IsJson = Annotated[bool, typer.Option("--json", help="Print the findings as a JSON list.")]


def doctor(self_test: SelfTest = True, as_json: IsJson = False) -> None:
    """Examine this machine: what it has, what will be used and why, what is missing and how to
    install it.

    Loads no model and changes nothing, except that it builds the CPU kernels if they are not
    built."""
    findings = _findings(self_test)
    if as_json:
        done = list(findings)
        typer.echo(json.dumps([asdict(finding) for finding in done], indent=2))
    else:
        done = _print(findings)
    if any(finding.state == "bad" for finding in done):
        raise typer.Exit(SOME_FAILED)


def _findings(with_self_test: bool) -> Iterable[Finding]:
    from mmdeploy_llm.cli.doctor import State, examine, self_test

    has_kernels = False
    for finding in examine(**cache_option()):
        has_kernels |= finding.topic == "CPU kernels" and finding.state is State.GOOD
        yield finding
    if with_self_test:
        from transformers.utils import logging

        logging.disable_progress_bar()  # of writing and reading the tiny models
        yield from self_test(has_kernels=has_kernels)


def _print(findings: Iterable[Finding]) -> list[Finding]:
    """Prints each finding as soon as it is there."""
    from rich.text import Text

    from mmdeploy_llm.cli.terminal.letters import printable
    from mmdeploy_llm.cli.terminal.output import make_console

    out, done = make_console(), []
    for finding in findings:
        mark, style = MARKS[finding.state]
        line = Text(f"{mark:<6}", style) + Text(f"{finding.topic:<20}", "bold")
        out.print(line + Text(printable(finding.text), "not bold"), soft_wrap=True)
        if finding.advice:
            out.print(Text(f"{'':<26}{printable(finding.advice)}", "yellow"), soft_wrap=True)
        done.append(finding)
    return done
