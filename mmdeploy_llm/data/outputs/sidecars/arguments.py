"""SidecarArguments: options of calls about sidecars, which signatures show, and of commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypedDict

from mmdeploy_llm.values.options.flags import Flag


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

    sidecar: Annotated[
        str | None,
        Flag(
            "Write each answer beside its picture: .txt makes a.txt for a.jpg. Failed and empty "
            "answers write none; what is not written is told.",
            metavar="SUFFIX",
        ),
    ]
    on_existing: Annotated[
        str,
        Flag(
            "A text that is there: skip, overwrite or append.  [default: skip]",
            metavar="MODE",
            is_rare=True,
        ),
    ]
    trigger: Annotated[
        Sequence[str],
        Flag(
            "Words that each text beside a picture begins with; may be repeated.",
            metavar="WORDS",
            is_rare=True,
            type=list[str],
        ),
    ]
    sidecar_template: Annotated[
        str | None,
        Flag(
            "The text, with {text}, answers and --columns by name, {trigger}, {file}, {stem} and "
            "{folder}.  [default: {text}]",
            metavar="TEMPLATE",
            is_rare=True,
        ),
    ]
    sidecar_prefix: Annotated[
        str, Flag("What stands before the text.", metavar="TEXT", is_rare=True)
    ]
    sidecar_suffix: Annotated[
        str, Flag("What stands after the text.", metavar="TEXT", is_rare=True)
    ]
