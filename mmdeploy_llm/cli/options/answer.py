"""Options of how every answer is generated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.values.options.engine_flags import EngineFlags

from .groups import Given, Group, Rows, Shown
from .values import named_values, template_kwargs

MAX_TOKENS = 1024

Thinking = Annotated[
    bool | None,
    typer.Option(
        "--thinking/--no-thinking",
        help="Whether the model reasons first.  [default: the model's default]",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions(Group):
    """How every answer is generated."""

    title: ClassVar[str] = "Question and answer"

    thinking: Thinking = None
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Upper limit of generated tokens per answer."),
        Shown(MAX_TOKENS),
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="X",
            help="Randomness of sampling; 0 always picks the most probable token.  [default: 0] "
            "Where --sampling has top_p, top_k, min_p or n, the default is the model's own.",
        ),
    ] = None
    sampling: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Another sampling parameter, such as top_p=0.9, or a JSON file. The file, or the "
            "text itself, is an object with names and values; may be repeated.",
        ),
    ] = None
    parsers: Annotated[Given, Rows(EngineFlags, "reasoning_parser", "tool_call_parser")]

    def to_settings(self) -> dict[str, Any]:
        """Returns the variables for the chat template."""
        return {"chat_template_kwargs": template_kwargs(self.thinking)}

    def to_sampling(self) -> dict[str, Any]:
        """Returns the parameters. Raises ConfigError for one that is given twice."""
        from mmdeploy_llm.batch.items import DRAWS

        more = named_values("--sampling", self.sampling or [], "top_p=0.9")
        if "temperature" in more and self.temperature is not None:
            raise ConfigError("--temperature and --sampling temperature=... : give one of them")
        if "max_tokens" in more and self.max_tokens is not None:
            raise ConfigError("--max-tokens and --sampling max_tokens=... : give one of them")
        is_drawn = any(name in more for name in DRAWS)
        temperature = 0.0 if self.temperature is None and not is_drawn else self.temperature
        return {"max_tokens": self.max_tokens or MAX_TOKENS, "temperature": temperature, **more}
