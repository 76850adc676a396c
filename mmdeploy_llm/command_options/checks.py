"""Options of what an answer must keep."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from mmdeploy_llm.answers import VALIDATE_RETRIES
from mmdeploy_llm.errors import ConfigError

from .groups import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions(Group):
    """Rules that every answer must keep."""

    title: ClassVar[str] = "Question and answer"

    validate: Annotated[
        Path | None,
        typer.Option(
            metavar="SCHEMA",
            hidden=True,
            help="File of a JSON schema that every answer must keep. One that breaks it is asked "
            "again, then recorded as an error with its text.",
        ),
    ] = None
    avoid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help='An opening that is not wanted, such as "This image"; may be repeated. An answer '
            "with it is asked again, as one that breaks --validate.",
        ),
    ] = None
    max_words: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Most words of an answer; a longer one is asked again."
        ),
    ] = None
    max_chars: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="The same for characters.")
    ] = None
    validate_retries: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="K",
            hidden=True,
            help="How often an answer that breaks --validate, --avoid, --max-words or --max-chars "
            "is asked again.",
        ),
    ] = VALIDATE_RETRIES

    def to_settings(self) -> dict[str, Any]:
        """Returns the checks and the number of retries. Raises ConfigError for a bad schema."""
        from mmdeploy_llm.answers.checker import read_schema
        from mmdeploy_llm.answers.rules import TextRules

        rules = TextRules.given(self.avoid, self.max_words, self.max_chars)
        has_checks = self.validate is not None or bool(rules.values())
        if not has_checks and self.validate_retries != VALIDATE_RETRIES:
            raise ConfigError(
                "--validate-retries has an effect only with --validate, --avoid, --max-words or "
                "--max-chars"
            )
        schema = None if self.validate is None else read_schema(str(self.validate))
        return {"schema": schema, "rules": rules, "validate_retries": self.validate_retries}
