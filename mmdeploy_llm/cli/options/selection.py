"""Options of which items of an input are done."""

from __future__ import annotations

import codecs
import csv
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.values.text.encodings import is_utf8, not_utf8

from .groups import Group
from .values import text_value

Recursive = Annotated[
    bool,
    typer.Option(
        "--recursive/--no-recursive",
        "-r",
        hidden=True,
        help="Whether folders are read with their subfolders.",
    ),
]
Limit = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Process only the first N lines or files.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionOptions(Group):
    """Which items of an input are done."""

    title: ClassVar[str] = "Input"

    recursive: Recursive = True
    limit: Limit = None
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N|auto",
            help="Every N-th item from the I-th on: N runs share the input. "
            "auto: as torchrun, SLURM or an indexed job of Kubernetes numbers this process; the "
            "shard then stands in the output's name.",
        ),
    ] = None

    random: Annotated[
        bool, typer.Option("--random", help="With --limit: N random ones, the same in each run.")
    ] = False
    random_seed: Annotated[
        int | None,
        typer.Option(metavar="N", hidden=True, help="Which ones --random draws.  [default: 0]"),
    ] = None
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID",
            help="Do only the item with this id, or those of @FILE. The file has an id on each "
            "line, or is a table of `dedupe`, NAME.csv; @@ is a literal @; may be repeated.",
        ),
    ] = None
    files_from: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Read paths of media from a file. It has a path on "
            "each line, or zero bytes between paths; - is standard input.",
        ),
    ] = None
    order: Annotated[
        str,
        typer.Option(
            metavar="finished|input",
            hidden=True,
            help="Order of the records: as items finish, or as they stand in the input. For the "
            "latter a record is held until those before it are written.",
        ),
    ] = "finished"

    def to_settings(self) -> dict[str, Any]:
        """Returns the selection, and whether folders are read with their subfolders."""
        from mmdeploy_llm.batch.options import selected

        selection = selected(
            shard=self.shard,
            limit=self.limit,
            random=self.random,
            random_seed=self.random_seed,
            only=listed_ids(self.only),
            order=self.order,
        )
        return {"selection": selection, "is_recursive": self.recursive}


def listed_ids(given: list[str] | None) -> list[str] | None:
    """Returns the ids of --only, with those that files list. Raises ConfigError."""
    if given is None:
        return None
    found: list[str] = []
    for text in given:
        is_list = text.startswith("@") and not text.startswith("@@")
        if is_list and text.lower().endswith(".csv"):
            found += _kept_ids(text[1:])
            continue
        whole = text_value("--only", text) or ""
        found += [line for line in whole.splitlines() if line] if is_list else [whole]
    return found


def _kept_ids(path: str) -> list[str]:
    """Returns the ids of the items that a table of `dedupe` keeps. Raises ConfigError."""
    try:
        with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            rows = csv.DictReader(file)
            if not {"id", "keep"} <= set(rows.fieldnames or ()):
                raise ConfigError(
                    f"--only: {path!r} has no columns id and keep, as the tables of `dedupe` have; "
                    "a list of ids has one on each line, in a file that does not end in .csv"
                )
            return [row["id"] for row in rows if row["keep"] == "yes"]
    except (OSError, csv.Error) as error:
        raise ConfigError(f"--only: the table {path!r} cannot be read: {error}") from error


def listed_files(given: str) -> list[str]:
    """Reads the paths of --files-from. Raises ConfigError when there are none."""
    try:
        data = sys.stdin.buffer.read() if given == "-" else Path(given).read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--files-from {given!r} cannot be read: {error}") from error
    data = data.removeprefix(codecs.BOM_UTF8)  # as editors of Windows write it
    names = data.split(b"\0") if b"\0" in data else data.splitlines()
    paths = [os.fsdecode(name) for name in names if name.strip()]
    for path in paths:  # a file may have such a name, a list in another encoding names none
        if not is_utf8(path) and not os.path.lexists(path):
            raise ConfigError(f"--files-from {given!r} is {not_utf8(path)}")
    if not paths:
        raise ConfigError(f"--files-from {given!r} has no paths")
    return paths
