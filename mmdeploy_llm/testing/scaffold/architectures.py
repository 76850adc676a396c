"""Writes the table of supported architectures between two markers of a page.

python -m mmdeploy_llm.testing.scaffold.architectures docs/architectures.md
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from mmdeploy_llm.data.records.files import Folder
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import ModelSpec, PluginManager
from mmdeploy_llm.hooks.selection import ANY_MODEL
from mmdeploy_llm.hooks.versions import OUR_DISTRIBUTION

BEGIN, END = "<!-- architectures: begin -->", "<!-- architectures: end -->"
HEADER = (
    "| architecture | family | plugin | input | reasoning parser | tool parser | draft layer |",
    "|---|---|---|---|---|---|---|",
)


def table(manager: PluginManager, distribution: str | None = None) -> str:
    """Returns a Markdown table with a row per architecture, sorted: the model that serves it.

    distribution: lists only the plugins of this package; None lists all.
    """
    owners = {
        plugin.name
        for plugin in manager.plugins
        if distribution is None or plugin.distribution == distribution
    }
    models = [spec for spec in manager.models if manager.owner(spec) in owners]
    pairs = [(name, spec) for spec in models for name in spec.architectures]
    best: dict[str, int] = {}  # priorities
    for name, spec in pairs:
        best[name] = max(spec.priority, best.get(name, spec.priority))
    rows = [
        _row(name, spec, manager.owner(spec)) for name, spec in pairs if spec.priority == best[name]
    ]
    return "\n".join((*HEADER, *sorted(rows)))


def replaced(text: str, new: str) -> str:
    """Returns `text` with `new` between the markers. Raises ConfigError unless `text` has exactly
    one pair of markers."""
    pattern = re.compile(f"({re.escape(BEGIN)}\n).*?({re.escape(END)})", re.DOTALL)
    found, count = pattern.subn(lambda match: f"{match[1]}{new}\n{match[2]}", text)
    if count != 1:
        raise ConfigError(f"the file has {count} sections from {BEGIN} to {END}; it needs one")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and updates the files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    update(parser.parse_args(arguments).files)


def update(files: Iterable[Path]) -> None:
    """Writes the table of this package's plugins into each file."""
    new = table(PluginManager.load(), OUR_DISTRIBUTION)
    for file in files:
        with Folder.open(file.parent) as folder:
            folder.write(file.name, [replaced(file.read_text("utf-8"), new).encode()])


def _row(architecture: str, spec: ModelSpec, owner: str) -> str:
    cells = (
        f"`{spec.name}`",
        f"`{owner}`",
        ", ".join(("text", *spec.media)),
        *(f"`{parser}`" if parser else "" for parser in (spec.reasoning, spec.tools)),
        "`mtp`" if spec.draft_head else "",
    )
    return f"| {_named(architecture)} | {' | '.join(cells)} |"


def _named(architecture: str) -> str:
    return "any other of transformers" if architecture == ANY_MODEL else f"`{architecture}`"


if __name__ == "__main__":
    main()
