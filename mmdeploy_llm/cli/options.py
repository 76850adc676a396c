"""What the commands share: their options, and how they become arguments."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmdeploy_llm.errors import ConfigError

if TYPE_CHECKING:
    from mmdeploy_llm.batch.output import Mode
    from mmdeploy_llm.intake.media import MediaLoader
    from mmdeploy_llm.llm import LLM
    from mmdeploy_llm.params import SamplingParams

SOME_FAILED, USAGE, STOPPED, INTERRUPTED = 1, 2, 3, 130
MANY_MEDIA = {"image": 16, "video": 4}  # of one prompt, where --engine does not say

Model = Annotated[
    str, typer.Option("--model", "-m", help="Folder, hub id or name of a bundled model.")
]
Parser = Annotated[
    str,
    typer.Option(help="Splits off reasoning: a parser's name, auto: the model's own, none."),
]
ToolParser = Annotated[
    str,
    typer.Option(help="Takes out tool calls: a parser's name, auto: the model's own, none."),
]
Tools = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="JSON file: a list of tools that the model may call."),
]
Thinking = Annotated[
    bool | None,
    typer.Option("--thinking/--no-thinking", help="Reason first or not.  [default: as the model]"),
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Most tokens to generate for an answer.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0: always the most probable token.")]
DType = Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Engine = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="Any other option of LLM(); may be repeated."),
]
Image = Annotated[list[str] | None, typer.Option(help="A picture to ask about; may be repeated.")]

Output = Annotated[
    Path, typer.Option("--output", "-o", help="JSONL, a line for each item as it finishes.")
]
NoReport = Annotated[bool, typer.Option("--no-report", help="Write no HTML page.")]
HasTable = Annotated[bool, typer.Option("--table", help="End with a table of results.")]
Recursive = Annotated[bool, typer.Option("--recursive", "-r", help="Look into subfolders too.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Keep the output, do what is missing or failed.")
]
RetryFailed = Annotated[
    bool,
    typer.Option(
        "--retry-failed/--no-retry-failed", help="With --resume: do failed items again, or not."
    ),
]
MaxFailures = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Stop when N items of this run failed.")
]
Shard = Annotated[
    str | None,
    typer.Option(metavar="I/N", help="Do the I-th of N parts, from 1/N to N/N, by line number."),
]
Limit = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Only the first N lines or files.")
]
NumSeqs = Annotated[
    int | None, typer.Option(min=1, help="Items that are worked on at the same time.")
]
NumThreads = Annotated[int | None, typer.Option(min=1, help="CPU threads to compute.")]


def output_mode(overwrite: bool, resume: bool) -> Mode:
    """What to do with an output file that exists. Raises ConfigError for both at once."""
    if overwrite and resume:
        raise ConfigError("--overwrite and --resume contradict each other; give one of them")
    return "overwrite" if overwrite else "resume" if resume else "new"


def template_kwargs(thinking: bool | None) -> dict[str, Any]:
    """Variables for the chat template."""
    return {} if thinking is None else {"enable_thinking": thinking}


def sampling_params(**values: Any) -> SamplingParams:
    """SamplingParams, imported when needed."""
    from mmdeploy_llm.params import SamplingParams

    return SamplingParams(**values)


def engine_options(ctx: typer.Context, extra: list[str] | None, **options: Any) -> dict[str, Any]:
    """The options of LLM(): those given by name, overridden by NAME=VALUE texts; None is left to
    the engine. Values are read as JSON where they are JSON, else as text. The context brings the
    plugins that the environment names."""
    parsed = dict(named_value("--engine", text, "max_model_len=4096") for text in extra or [])
    for name in ("reasoning_parser", "tool_call_parser"):
        if options.get(name) == "none":
            options[name] = None
    asked = {**options, **parsed, **ctx.obj}
    return {name: value for name, value in asked.items() if value is not None}


def named_value(option: str, text: str, example: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as JSON where it is JSON. Raises ConfigError for anything else."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ConfigError(f"{option} {text!r} must be NAME=VALUE, such as {example}")
    try:
        return name.replace("-", "_"), json.loads(value)
    except ValueError:
        return name.replace("-", "_"), value


def read_tools(path: Path | None) -> Any:
    """What the file of --tools holds; None without one. Raises ConfigError when it is no JSON."""
    if path is None:
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tools {str(path)!r} cannot be read as JSON: {error}") from error


@contextmanager
def open_llm(model: str, options: Mapping[str, Any]) -> Iterator[LLM]:
    """The model, closed in the end."""
    from mmdeploy_llm.llm import LLM

    with LLM(model=model, **options) as llm:
        yield llm


def open_media(model: str, options: Mapping[str, Any]) -> MediaLoader:
    """What reads the model's media, without its weights."""
    from mmdeploy_llm.config import EngineConfig
    from mmdeploy_llm.startup import media

    return media.open_media(EngineConfig.from_options(model, options))


def print_error(message: str) -> None:
    """One clear red line on standard error."""
    from mmdeploy_llm.terminal import printable

    typer.secho(f"error: {printable(message)}", fg="red", err=True)
