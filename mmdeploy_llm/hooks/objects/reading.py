"""ReadingPreset: how the models of an OCR family are asked for the text of a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KEEP = f"{__name__}:keep"  # converts the answers of presets that name no converter


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingPreset:
    """The prompt, the budget and the limits with which `mmdeploy-llm read` asks a model.

    name, aliases: what `--preset` calls it.
    architectures: names in config.json's `architectures` whose models it is for.
    marks: texts of which the model's name, its config or its card has one, in any case, where other
        models share the architecture; (): it is for all of them. A preset with a mark that fits
        beats one without marks.
    tasks: the prompts by task; the first is that of a whole page. A prompt may have {text_layer},
        {width}, {height} (pixels of the page), {page} and {pages}; "": the page alone is asked.
    system: the system message.
    image_tokens: budget of a page, as the engine's option; None leaves the engine's.
    dpi: a page is drawn with at most so many pixels for an inch.
    longest_side: pixels of a page's longer side at most; None: no bound of its own.
    max_tokens: of an answer.
    sampling: further values of SamplingParams.
    convert: "module:function" that makes Markdown of an answer; None: answers are Markdown. It is
        called as function(answer, page), see ReadPage, and returns a text or a ReadText. An answer
        for which it raises ValueError is kept as it is, and told.
    source: where the prompts come from, for readers of the preset.
    """

    name: str
    architectures: tuple[str, ...]
    tasks: Mapping[str, str]
    marks: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    system: str | None = None
    image_tokens: int | str | None = None
    dpi: int = 200
    longest_side: int | None = None
    max_tokens: int = 8192
    sampling: Mapping[str, Any] = field(default_factory=dict)
    convert: str | None = None
    source: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadText:
    """Markdown of a page. notes: what a reader should know of it, such as a table that is kept as
    it was written."""

    text: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPage:
    """A page whose answer is converted. task: of the preset, "page" or another. tables: "html" or
    "markdown"."""

    task: str
    tables: str = "html"


def keep(answer: str, page: ReadPage) -> str:
    """Returns an answer that is Markdown as it is."""
    return answer
