"""SidecarText: the text of a sidecar, built from a record."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.records.template import Template
from mmdeploy_llm.data.records.unicode_text import without_surrogates
from mmdeploy_llm.errors import ConfigError

OWN_NAMES = ("text", "trigger", "file", "stem", "folder")  # what the template of any file may have


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarText:
    """Builds texts: the trigger words, `prefix`, the template, `suffix`. Raises ConfigError for a
    template that is none.

    template: None is "{text}". trigger: words that come first, with commas; not again where the
    template has {trigger}.
    """

    template: str | None = None
    prefix: str = ""
    suffix: str = ""
    trigger: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        Template(self.template or "{text}")

    def check(self, answers: Iterable[str]) -> None:
        """Raises ConfigError for a name that is neither a file's own nor one of the answers."""
        known = dict.fromkeys((*OWN_NAMES, *answers))
        for name in Template(self.template or "{text}").names:
            if name not in known:
                raise ConfigError(
                    f"no value fills {{{name[:40]}}} in --sidecar-template; files have "
                    f"{', '.join(f'{{{own}}}' for own in known)}"
                )

    def of(self, record: Record, path: str) -> str:
        """Returns the text of a record about the file at an absolute path, in one line: trainers
        read the first line only. Raises RequestError when a name in the template has no value."""
        template = Template(self.template or "{text}")
        trigger = ", ".join(self.trigger)
        values = {name: _shown(value) for name, value in self._values(record, path).items()}
        text = self.prefix + template.fill({**values, "trigger": trigger}) + self.suffix
        if trigger and "trigger" not in template.names:
            text = f"{trigger}, {text}"
        return without_surrogates(" ".join(text.split()))

    def _values(self, record: Record, path: str) -> dict[str, Any]:
        name = os.path.basename(path)
        return {
            **record.columns,
            **(getattr(record, "answers", None) or {}),
            "text": record.text,
            "file": name,
            "stem": os.path.splitext(name)[0],
            "folder": os.path.basename(os.path.dirname(path)),
        }


def _shown(value: Any) -> Any:
    """Returns a list of texts as tags are written; other values as they are."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return value
