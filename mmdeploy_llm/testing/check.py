"""check_plugin: the checks of an installed plugin that need nothing from its author."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of one check.

    check: its name. subject: what was checked, such as "reasoning parser acme", "" for the plugin
    as a whole. message: why it failed or was skipped, "" when it passed.
    """

    check: str
    subject: str
    outcome: Literal["pass", "fail", "skip"]
    message: str
    seconds: float


def check_plugin(name: str, *, model_folder: Path | None = None) -> Iterator[Verdict]:
    """Runs the checks of the installed plugin `name`, one verdict each, as they finish.

    Parsers are tried on texts made of their markers, processors on generated media of their kind,
    models on transformers' own config of their architecture, with small sizes. model_folder: a
    checkpoint; the model that serves it gets all checks, the processors get its files. Raises
    PluginLoadError when no such plugin is installed.
    """
    raise NotImplementedError
