"""The options of what a batch reads of a folder, for all doors: commands and Python."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.finding.files import check_animated
from mmdeploy_llm.finding.names import Patterns
from mmdeploy_llm.sinks.scan import Mode

from .file_source import FileSource

if TYPE_CHECKING:
    from .sources import Source


class FindingArguments(TypedDict, total=False):
    """Arguments of `LLM.run_batch` about which files are read.

    exclude: patterns of files and folders that are left out, such as "*.tmp" or "drafts/**".
    animated: what images of several frames are: "image" (the first frame) or "video".
    skipped: file for the list of what is not read, with the reasons.
    prune: whether records of files that are certainly gone are removed; needs resume.
    """

    exclude: str | Sequence[str]
    animated: str
    skipped: str | os.PathLike[str] | None
    prune: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingOptions:
    """Which files of an input are read; see FindingArguments."""

    exclude: tuple[str, ...] = ()
    animated: str = "image"
    skipped: Path | None = None
    prune: bool = False

    def __post_init__(self) -> None:
        check_animated(self.animated)
        Patterns(self.exclude)

    @classmethod
    def given(cls, arguments: Mapping[str, Any]) -> FindingOptions:
        """Returns the options of FindingArguments. Raises ConfigError for wrong ones."""
        values = dict(arguments)
        exclude = values.pop("exclude", None) or ()
        patterns = (exclude,) if isinstance(exclude, str) else tuple(exclude)
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise ConfigError("exclude must be a pattern such as '*.tmp', or a list of patterns")
        listed = values.pop("skipped", None)
        return cls(exclude=patterns, skipped=None if listed is None else Path(listed), **values)

    def check(self, mode: Mode, source: Source) -> None:
        """Raises ConfigError for options that would have no effect, and where the list of what is
        skipped cannot be written."""
        if self.prune and mode != "resume":
            raise ConfigError("prune needs resume: a new output has no records to remove")
        if self.skipped is not None:
            source.skipped.check_target(self.skipped)
        is_default = not self.exclude and self.animated == "image" and not self.prune
        if not is_default and not isinstance(source, FileSource):
            raise ConfigError(
                "exclude, animated and prune are for folders and files of media; this input is a "
                "corpus"
            )

    def values(self) -> dict[str, Any]:
        """Returns what decides answers, where it is not the default."""
        return {} if self.animated == "image" else {"animated": self.animated}
