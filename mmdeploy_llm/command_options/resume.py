"""Options of what becomes of an existing output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from mmdeploy_llm.errors import ConfigError

from .groups import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeOptions(Group):
    """How an existing output is treated."""

    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing output file.")
    ] = False
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue an existing output file: run items that are missing or failed.",
        ),
    ] = False
    resume_anyway: Annotated[
        bool,
        typer.Option(
            "--resume-anyway",
            help="--resume, also when the output has results of another model, of other options "
            "or of another question: these stay.",
        ),
    ] = False
    retry_failed: Annotated[
        str,
        typer.Option(
            metavar="CODES",
            help="With --resume: which failed items to retry, all or those with these error "
            "codes, such as 408,500.",
        ),
    ] = "all"
    no_retry_failed: Annotated[
        bool,
        typer.Option("--no-retry-failed", help="With --resume: leave failed items as they are."),
    ] = False

    def to_settings(self) -> dict[str, Any]:
        """Returns how the output is treated. Raises ConfigError for options that contradict."""
        from mmdeploy_llm.batch.options import retry_settings

        is_resumed = self.resume or self.resume_anyway
        retried = False if self.no_retry_failed else self.retry_failed
        if self.overwrite and is_resumed:
            raise ConfigError("--overwrite and --resume contradict each other; give one of them")
        if retried != "all" and not is_resumed:
            raise ConfigError(
                "--retry-failed CODES and --no-retry-failed: each needs --resume; a new run has "
                "nothing to retry"
            )
        return {
            "mode": "overwrite" if self.overwrite else "resume" if is_resumed else "new",
            "is_any_config_kept": self.resume_anyway,
            **retry_settings(retried),
        }
