"""The options of `LLM.read`, which its signature shows, and of the command `read`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from mmdeploy_llm.batch.arguments import RunArguments
from mmdeploy_llm.data.files.arguments import PAGES, DrawingArguments, FindingArguments
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.values.options.flags import Flag


class WishArguments(DrawingArguments, total=False):
    """Arguments of `LLM.read` alone.

    preset: how the model is asked; None: the one for the model. task: one of the preset's prompts.
    prompt: asks something else, with {text_layer}, {page}, {pages}, {width}, {height}.
    pages: such as "1-5,8,-1". dpi, password: of documents. tables: "html" or "markdown".
    upright: "auto" turns pages that lie on a side or upside down in their pixels, "keep" none.
    running: "mark" or "keep", for headers and footers in Markdown.
    sampling: values of SamplingParams that are not the preset's.
    """

    preset: Annotated[
        str | None,
        Flag(
            "How the model is asked: a preset that `mmdeploy-llm plugins` lists.  [default: the "
            "one for the model]",
            metavar="NAME",
        ),
    ]
    task: Annotated[
        str | None,
        Flag(
            "What is asked for: page, or another task of the preset, such as table.",
            metavar="NAME",
        ),
    ]
    prompt: Annotated[
        str | None,
        Flag(
            "The question about each page instead of the preset's, or @FILE. It may have "
            "{text_layer}, what the document itself says, {page}, {pages}, {width} and {height}.",
            metavar="TEXT",
            names=("--prompt", "-p"),
        ),
    ]
    pages: Annotated[str | None, Flag(PAGES, metavar="RANGES")]
    tables: Annotated[
        str | None,
        Flag(
            "Write all tables alike.  [default: as the model writes them]",
            metavar="html|markdown",
        ),
    ]
    upright: Annotated[
        str,
        Flag(
            "Turn pages that lie on a side or upside down in their pixels, as scans do, before the "
            "model sees them: auto. Needs the extra upright.",
            metavar="auto|keep",
            default="keep",
        ),
    ]
    running: Annotated[
        str,
        Flag(
            "Headers and footers that many pages of a document have: made comments after the first "
            "one, or kept. Pages alone and records keep them.",
            metavar="mark|keep",
            is_rare=True,
            default="mark",
        ),
    ]
    sampling: Mapping[str, Any]


class ReadArguments(WishArguments, FindingArguments, RunArguments, total=False):
    """Arguments of `LLM.read`; see WishArguments, FindingArguments and RunArguments."""


CHOICES = {"tables": ("html", "markdown"), "running": ("mark", "keep"), "upright": ("auto", "keep")}


def check_tables(given: Mapping[str, Any], *, is_written: bool) -> None:
    """Raises ConfigError for unknown choices among what is given, and for one without an effect.
    is_written: whether Markdown is."""
    for name, known in CHOICES.items():
        value = given.get(name)
        if value is not None and value not in known:
            raise ConfigError(f"{name} must be one of {', '.join(known)}, got {value[:40]!r}")
    if given.get("running") is not None and not is_written:
        raise ConfigError("running needs markdown, a folder for it")
