"""Exit codes of the program, and how it prints an error."""

from __future__ import annotations

import typer

SOME_FAILED, USAGE, STOPPED, SOME_LACKING = 1, 2, 3, 4


def print_error(message: str) -> None:
    """Prints one red line on standard error."""
    from mmdeploy_llm.cli.terminal.output import printable

    typer.secho(f"error: {printable(message)}", fg="red", err=True)
