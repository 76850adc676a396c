"""Options of what becomes of an existing output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from mmdeploy_llm.errors import ConfigError

from .groups import Group, Shown


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeOptions(Group):
    """How an existing output is treated."""

    title: ClassVar[str] = "Output"

    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing output file.")
    ] = False
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue an existing output: do what is missing or has failed.",
        ),
    ] = False
    resume_anyway: Annotated[
        bool,
        typer.Option(
            "--resume-anyway",
            hidden=True,
            help="--resume, also when the output has results of another model, of other options "
            "or of another question: these stay.",
        ),
    ] = False
    retry_failed: Annotated[
        str | None,
        typer.Option(
            metavar="WHICH",
            help="With --resume: what to retry. All (that failed), or outcomes and error codes, "
            "such as empty,truncated,408.",
        ),
        Shown("all"),
    ] = None
    no_retry_failed: Annotated[
        bool,
        typer.Option(
            "--no-retry-failed",
            hidden=True,
            help="With --resume: leave failed items as they are.",
        ),
    ] = False

    @property
    def is_resumed(self) -> bool:
        """Whether an existing output goes on."""
        return self.resume or self.resume_anyway

    def to_settings(self) -> dict[str, Any]:
        """Returns how the output is treated. Raises ConfigError for options that contradict."""
        from mmdeploy_llm.data.records.outcome import Retried

        if self.no_retry_failed and self.retry_failed is not None:
            raise ConfigError(
                "--retry-failed WHICH and --no-retry-failed contradict each other; give one of them"
            )
        retried = "all" if self.retry_failed is None else self.retry_failed
        if self.overwrite and self.is_resumed:
            raise ConfigError("--overwrite and --resume contradict each other; give one of them")
        if (self.no_retry_failed or self.retry_failed is not None) and not self.is_resumed:
            raise ConfigError(
                "--retry-failed WHICH and --no-retry-failed: each needs --resume; a new run has "
                "nothing to retry"
            )
        return {
            "mode": "overwrite" if self.overwrite else "resume" if self.is_resumed else "new",
            "is_any_config_kept": self.resume_anyway,
            "retried": Retried.parse(False if self.no_retry_failed else retried),
        }
