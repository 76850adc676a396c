"""Options that stand alone in commands for one prompt, and for programs that read their output."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

IsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Image = Annotated[
    list[str] | None, typer.Option(help="Path of a picture to ask about; may be repeated.")
]
Tools = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="JSON file with tools that the model may call."),
]
