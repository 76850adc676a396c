"""Chooses how a model is asked for the text of a page: a preset, and what the caller says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import PluginManager, ReadingPreset, ReadPage, ReadText

if TYPE_CHECKING:
    from mmdeploy_llm.engine.startup.model_files import ModelFiles

OWN = "prompt"  # the task where the caller asks something else
CARD_BYTES = 64 * 1024
GENERAL = ReadingPreset(
    name="general",
    architectures=("*",),
    tasks={
        "page": "Convert this page to Markdown. Keep all of its text, in reading order. Write "
        "tables as HTML and formulas as LaTeX. Answer with the Markdown alone."
    },
    sampling={"no_repeat_ngram": True},
    convert="mmdeploy_llm.batch.documents.reading.markup.marks:plain",
    source="For models that no preset is made for.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How pages are asked for. prompt: with names in it, see data/files/question_fields.py.
    convert: makes Markdown of an answer."""

    preset: ReadingPreset
    task: str
    prompt: str
    convert: Callable[[str, ReadPage], str | ReadText]
    tables: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def about(self) -> str:
        """Says which preset is used, in a sentence."""
        if self.task == OWN:
            preset = "" if self.preset is GENERAL else f"preset {self.preset.name}, "
            return f"{preset}your prompt"
        if self.preset is GENERAL:
            return "no preset is made for this model: a general prompt is used (--preset, --prompt)"
        return f"preset {self.preset.name}, task {self.task}"

    def configuration(self) -> dict[str, Any]:
        """Returns what decides answers besides the engine and the parameters; no password."""
        return {
            "reading.prompt": self.prompt,
            "reading.convert": self.preset.convert or "",
            "reading.tables": self.tables or "",
            **{f"reading.{name}": own for name, own in self.options.items() if name != "password"},
        }


def choose_asking(
    files: ModelFiles,
    name: str | None,
    task: str | None,
    prompt: str | None,
    tables: str | None,
    options: Mapping[str, Any],
    model: str = "",
) -> Asking:
    """Returns how the model is asked. name: of a preset; None: the one for the model. prompt:
    instead of the preset's. options: of documents. Raises ConfigError."""
    plugins = files.plugins
    check_asking(plugins, name, task, prompt)
    if name is not None:
        preset = plugins.reading_preset(name)
    else:
        architecture = files.checkpoint.architecture
        found = plugins.reading_preset_for(architecture, about_of(files, model))
        preset = GENERAL if found is None else found
    chosen = next(iter(preset.tasks)) if task is None else task
    _check_task(preset, chosen)
    sides = {} if preset.longest_side is None else {"longest_side": preset.longest_side}
    convert = _converter(preset, files)
    return Asking(
        preset=preset,
        task=chosen if prompt is None else OWN,
        prompt=preset.tasks[chosen] if prompt is None else prompt,
        convert=convert,
        tables=tables,
        options={"dpi": preset.dpi, **sides, **options},
    )


def check_asking(
    plugins: PluginManager, name: str | None, task: str | None, prompt: str | None
) -> None:
    """Tells what no model could be asked, see choose_asking. Raises ConfigError."""
    if task is not None and prompt is not None:
        raise ConfigError("--task and --prompt contradict each other; give one of them")
    if name is not None:
        preset = plugins.reading_preset(name)
        _check_task(preset, next(iter(preset.tasks)) if task is None else task)
    elif task is not None:
        known = dict.fromkeys(key for preset in plugins.reading_presets for key in preset.tasks)
        if task not in (*GENERAL.tasks, *known):
            raise ConfigError(f"no preset has a task {task!r}; they have {', '.join(known)}")


def _check_task(preset: ReadingPreset, task: str) -> None:
    if task not in preset.tasks:
        raise ConfigError(
            f"the preset {preset.name} has no task {task!r}; it has {', '.join(preset.tasks)}"
        )


def _converter(preset: ReadingPreset, files: ModelFiles) -> Any:
    if preset is GENERAL:
        from .markup.marks import plain

        return plain
    return files.plugins.resolve(preset)


def about_of(files: ModelFiles, model: str) -> str:
    """Returns what tells a model from others of its architecture: its name, the names in its
    config, and what the head of its card says."""
    folder = files.checkpoint.folder
    found = [model, str(folder), json.dumps(files.checkpoint.config.to_dict(), default=str)]
    return "\n".join([*found, _card_head(folder / "README.md")])


def _card_head(path: Path) -> str:
    """Returns the values before a card and its title; the rest may speak of other models."""
    try:
        if not path.is_file():
            return ""
        with open(path, "rb") as file:
            text = file.read(CARD_BYTES).decode(errors="replace")
    except OSError:
        return ""
    match = re.match(r"---\s*\n(.*?)\n---\s*\n", text, re.DOTALL)
    head, body = ("", text) if match is None else (match[1], text[match.end() :])
    title = next((line for line in body.splitlines() if line.startswith("# ")), "")
    return f"{head}\n{title}"
