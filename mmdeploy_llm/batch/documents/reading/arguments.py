"""The arguments of `LLM.read`: as a wish of how documents are read, and as settings of a batch."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from mmdeploy_llm.batch.options import option_settings
from mmdeploy_llm.data.files.arguments import FindingArguments
from mmdeploy_llm.data.files.page_choice import check_drawing
from mmdeploy_llm.errors import ConfigError

from .options import ReadArguments, check_tables
from .plan import Wish

WISHED = ("preset", "task", "prompt", "tables", "pages", "dpi", "password", "running", "sampling")
OF_OUTPUT = (
    *("shard", "limit", "random", "random_seed", "only", "order", "recursive", "max_failures"),
    *("format", "part_items", "journal", "engine_restarts", "log_json"),
)


def read_arguments(
    options: ReadArguments, markdown: str | Path | None
) -> tuple[Wish, dict[str, Any]]:
    """Returns the wish and fields of BatchSettings. Raises ConfigError, also for an unknown one."""
    values: dict[str, Any] = dict(options)
    known = (*WISHED, *OF_OUTPUT, *FindingArguments.__annotations__)
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, (*known, "markdown", "report"), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"read has no argument {name!r}; {hint}")
    wished = {name: values.pop(name) for name in WISHED if name in values}
    drawn = {name: wished.pop(name, None) for name in ("dpi", "password")}
    running = wished.pop("running", "mark")
    check_tables(wished.get("tables"), running, is_written=markdown is not None)
    of_documents = {name: value for name, value in drawn.items() if value is not None}
    check_drawing(wished.get("pages"), of_documents)
    wish = Wish(
        options=of_documents,
        sampling=dict(wished.pop("sampling", None) or {}),
        markdown=None if markdown is None else Path(markdown),
        is_marked=running == "mark",
        **wished,
    )
    settings: Any = values
    return wish, option_settings(settings)
