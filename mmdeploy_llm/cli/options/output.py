"""Options of where results are written, and how they are shown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from mmdeploy_llm.errors import ConfigError

from .groups import Group

Output = Annotated[
    str,
    typer.Option(
        "--output",
        "-o",
        metavar="NAME",
        rich_help_panel="Output",
        help="Where results go: a file NAME.jsonl, or parts. NAME.jsonl gets a line per finished "
        "item; NAME.csv is a table; NAME.parquet and NAME.tar are folders of Parquet files or "
        "WebDataset tars; a URL such as s3://bucket/NAME.parquet gets whole parts.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownOptions(Group):
    """How results are shown. A command reads them itself."""

    title: ClassVar[str] = "Output"

    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="HTML report.  [default: `caption`: the name of --output with .html]",
        ),
    ] = None
    no_report: Annotated[
        bool, typer.Option("--no-report", hidden=True, help="Do not write an HTML report.")
    ] = False
    live: Annotated[
        bool,
        typer.Option(
            "--live", hidden=True, help="Serve the report on this machine while the run goes on."
        ),
    ] = False
    live_port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, hidden=True, help="The port of --live.  [default: a free one]"
        ),
    ] = 0
    table: Annotated[
        bool, typer.Option("--table", hidden=True, help="Print a table of results at the end.")
    ] = False

    @property
    def port(self) -> int | None:
        """The port of the live report; None without one. Raises ConfigError without a report."""
        if self.live and self.no_report:
            raise ConfigError("--live serves the report: leave out --no-report")
        return self.live_port if self.live else None
