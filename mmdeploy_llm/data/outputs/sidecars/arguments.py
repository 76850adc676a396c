"""SidecarArguments: options of calls about sidecars, which signatures show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict


class SidecarArguments(TypedDict, total=False):
    """Arguments of `LLM.run_batch` for sidecars.

    sidecar: suffix of a text file beside each picture, such as ".txt" or ".caption".
    on_existing: what happens to one that is there: "skip" leaves it, "overwrite" replaces it,
        "append" adds the text to its own.
    sidecar_template: the text, with {text}, answers and carried columns by name, {trigger},
        {file}, {stem} and {folder}.
    sidecar_prefix, sidecar_suffix: texts before and after it.
    trigger: words that every text begins with.
    """

    sidecar: str | None
    on_existing: str
    sidecar_template: str | None
    sidecar_prefix: str
    sidecar_suffix: str
    trigger: Sequence[str]
