"""The options of `LLM.read`, which its signature shows, and the choices of how Markdown is
written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mmdeploy_llm.data.files.arguments import FindingArguments
from mmdeploy_llm.errors import ConfigError


class ReadArguments(FindingArguments, total=False):
    """Arguments of `LLM.read` beside those of files, see FindingArguments, and those of
    OutputOptions that are named in OF_OUTPUT.

    preset: how the model is asked; None: the one for the model. task: one of the preset's prompts.
    prompt: asks something else, with {text_layer}, {page}, {pages}, {width}, {height}.
    pages: such as "1-5,8,-1". dpi, password: of documents. tables: "html" or "markdown".
    running: "mark" or "keep", for headers and footers in Markdown.
    sampling: values of SamplingParams that are not the preset's.
    """

    preset: str | None
    task: str | None
    prompt: str | None
    pages: str | None
    dpi: float | None
    password: str | None
    tables: str | None
    running: str
    sampling: Mapping[str, Any]
    shard: str | None
    limit: int | None
    random: bool
    random_seed: int
    only: Collection[str] | None
    order: str
    recursive: bool
    max_failures: int | None
    format: str | None
    part_items: int | None
    journal: str | None
    engine_restarts: int
    log_json: str | None


TABLES = ("html", "markdown")
RUNNING = ("mark", "keep")


def check_tables(tables: str | None, running: str, *, is_written: bool) -> None:
    """Raises ConfigError for unknown choices, and for one without an effect. is_written: whether
    Markdown is."""
    for name, value, known in (("tables", tables, TABLES), ("running", running, RUNNING)):
        if value is not None and value not in known:
            raise ConfigError(f"{name} must be one of {', '.join(known)}, got {value[:40]!r}")
    if running != RUNNING[0] and not is_written:
        raise ConfigError("running needs markdown, a folder for it")
