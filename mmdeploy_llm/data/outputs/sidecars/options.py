"""SidecarOptions: the options of sidecars, in Python and on the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from mmdeploy_llm.data.rows.formats.formats import all_suffixes
from mmdeploy_llm.data.rows.names import BUILT_IN_KINDS, is_media_name
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import KindTable

from .arguments import SidecarArguments
from .text import SidecarText

DEFAULT_SUFFIX = ".txt"
ON_EXISTING = ("skip", "overwrite", "append")
OnExisting = Literal["skip", "overwrite", "append"]
_SUFFIX = re.compile(r"(\.[A-Za-z0-9_-]{1,32}){1,3}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarOptions:
    """Says which files are written beside pictures. suffix: of their names. text: builds what they
    hold."""

    suffix: str = DEFAULT_SUFFIX
    on_existing: OnExisting = "skip"
    text: SidecarText = field(default_factory=SidecarText)

    def __post_init__(self) -> None:
        check_suffix(self.suffix)
        if self.on_existing not in ON_EXISTING:
            raise ConfigError(
                f"on_existing must be one of {', '.join(ON_EXISTING)}, got "
                f"{str(self.on_existing)[:40]!r}"
            )

    @classmethod
    def given(cls, arguments: Mapping[str, Any]) -> SidecarOptions | None:
        """Builds the options from arguments of a call, None without a `sidecar`. Raises ConfigError
        for a wrong one, and for one that has no effect."""
        suffix = arguments.get("sidecar")
        others = [name for name in SidecarArguments.__annotations__ if name != "sidecar"]
        if suffix is None:
            if set_ := [name for name in others if arguments.get(name)]:
                raise ConfigError(
                    f"--{set_[0].replace('_', '-')} needs --sidecar, such as --sidecar .txt (in "
                    f"Python {set_[0]} and sidecar)"
                )
            return None
        if not isinstance(suffix, str):
            raise ConfigError(f"sidecar must be a suffix such as '.txt', got {suffix!r}")
        return cls(
            suffix=suffix,
            on_existing=cast(OnExisting, arguments.get("on_existing") or "skip"),
            text=text_of_arguments(arguments),
        )


def text_of_arguments(arguments: Mapping[str, Any]) -> SidecarText:
    """Returns what builds the texts of sidecars. Raises ConfigError."""
    trigger = arguments.get("trigger") or ()
    return SidecarText(
        template=arguments.get("sidecar_template"),
        prefix=arguments.get("sidecar_prefix") or "",
        suffix=arguments.get("sidecar_suffix") or "",
        trigger=(trigger,) if isinstance(trigger, str) else tuple(trigger),
    )


def check_suffix(suffix: str, kinds: KindTable = BUILT_IN_KINDS) -> None:
    """Raises ConfigError for a suffix that is none, or is that of media or of a corpus: a sidecar
    would replace a picture, or be read as an input."""
    if not _SUFFIX.fullmatch(suffix):
        raise ConfigError(
            f"the suffix of sidecars must be like .txt or .caption, got {suffix[:40]!r}"
        )
    if is_media_name(f"x{suffix}", kinds) or f"x{suffix}".lower().endswith(all_suffixes(kinds)):
        raise ConfigError(
            f"{suffix!r} is the suffix of media or corpora; sidecars need one of their "
            "own, such as .txt"
        )
