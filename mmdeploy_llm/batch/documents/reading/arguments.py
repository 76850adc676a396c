"""The arguments of `LLM.read`: as a wish of how documents are read, and as settings of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmdeploy_llm.batch.arguments import check_known
from mmdeploy_llm.batch.options import option_settings
from mmdeploy_llm.data.files.page_choice import check_drawing

from .options import ReadArguments, WishArguments, check_tables
from .plan import Wish


def read_arguments(
    options: Mapping[str, Any], markdown: str | Path | None
) -> tuple[Wish, dict[str, Any]]:
    """Returns the wish and fields of BatchSettings. Raises ConfigError, also for an unknown one."""
    check_known("read", options, ReadArguments, "markdown", "report")
    wished = {name: own for name, own in options.items() if name in WishArguments.__annotations__}
    settings = {name: own for name, own in options.items() if name not in wished}
    check_tables(wished, is_written=markdown is not None)
    drawn = {name: wished.pop(name, None) for name in ("dpi", "password", "upright")}
    if drawn["upright"] == "keep":  # which says nothing
        drawn["upright"] = None
    of_documents = {name: value for name, value in drawn.items() if value is not None}
    check_drawing(wished.get("pages"), of_documents)
    wish = Wish(
        options=of_documents,
        sampling=dict(wished.pop("sampling", None) or {}),
        markdown=None if markdown is None else Path(markdown),
        is_marked=wished.pop("running", None) != "keep",
        **wished,
    )
    return wish, option_settings(settings)
