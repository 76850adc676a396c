"""Options of which items of an input are done."""

from __future__ import annotations

import codecs
import csv
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from mmdeploy_llm.batch.arguments import RunArguments
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.values.text.encodings import is_utf8, not_utf8

from .groups import Given, Group, Rows
from .values import text_value


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionOptions(Group):
    """Which items of an input are done."""

    title: ClassVar[str] = "Input"

    items: Annotated[
        Given, Rows(RunArguments, "recursive", "limit", "shard", "random", "random_seed", "only")
    ]
    files_from: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Read paths of media from a file. It has a path on "
            "each line, or zero bytes between paths; - is standard input.",
        ),
    ] = None
    ordered: Annotated[Given, Rows(RunArguments, "order")]

    def to_batch(self) -> dict[str, Any]:
        """Returns the selection. Raises ConfigError."""
        found = {**self.items, **self.ordered}
        return {**found, "only": listed_ids(found["only"])} if "only" in found else found

    def of_shard(self, shard: str | None) -> SelectionOptions:
        """Returns the options with another shard."""
        return replace(self, items={**self.items, "shard": shard})


def listed_ids(given: Iterable[str]) -> list[str]:
    """Returns the ids of --only, with those that files list. Raises ConfigError."""
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
