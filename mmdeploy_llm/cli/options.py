"""Options that several commands share, and their conversion to arguments of LLM and its calls."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmdeploy_llm.batch.answers import VALIDATE_RETRIES
from mmdeploy_llm.desk.deaths import ENGINE_RESTARTS
from mmdeploy_llm.errors import ConfigError

from .interrupts import INTERRUPTED as INTERRUPTED

if TYPE_CHECKING:
    from mmdeploy_llm.aio.async_llm import AsyncLLM
    from mmdeploy_llm.batch.answers.rounds import Answerer
    from mmdeploy_llm.intake.media import MediaLoader
    from mmdeploy_llm.llm import LLM
    from mmdeploy_llm.params import SamplingParams
    from mmdeploy_llm.sinks.scan import Mode

SOME_FAILED, USAGE, STOPPED, SOME_LACKING = 1, 2, 3, 4
MANY_MEDIA = {"image": 16, "video": 4}  # default limit of media items per prompt

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="Folder of a model, its Hugging Face id, a bundled model's name, or a GGUF file; the "
        "file with its vision tower, mmproj-*.gguf, is found in the same folder.",
    ),
]
ModelArgument = Annotated[
    str, typer.Argument(help="Folder of a model, its Hugging Face id, or a bundled model's name.")
]
ToolParser = Annotated[
    str,
    typer.Option(
        help="How to extract tool calls from the answer: auto (the model's own parser), none, or "
        "the name of a parser."
    ),
]
Tools = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="JSON file with a list of tools that the model may call."),
]
Thinking = Annotated[
    bool | None,
    typer.Option(
        "--thinking/--no-thinking",
        help="Whether the model reasons before it answers.  [default: the model's default]",
    ),
]
Temperature = Annotated[
    float,
    typer.Option(min=0.0, help="Randomness of sampling; 0 always picks the most probable token."),
]
DType = Annotated[
    str,
    typer.Option(help="Number format of weights: auto, bfloat16, float16 or float32."),
]
Engine = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="Any other engine option, such as max_model_len=4096; may be repeated.",
    ),
]
IsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Image = Annotated[
    list[str] | None, typer.Option(help="Path of a picture to ask about; may be repeated.")
]
Output = Annotated[
    str,
    typer.Option(
        "--output",
        "-o",
        help="Where results go: NAME.jsonl gets a line per finished item; NAME.parquet and "
        "NAME.tar are folders of Parquet files or WebDataset tars; a URL such as "
        "s3://bucket/NAME.parquet gets whole parts.",
    ),
]
Recursive = Annotated[bool, typer.Option("--recursive", "-r", help="Search subfolders too.")]
Limit = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Process only the first N lines or files.")
]
NumThreads = Annotated[
    int | None, typer.Option(min=1, help="CPU threads for compute.  [default: one per core]")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The model, and how it is computed."""

    model: Model = "shapes-vl"
    dtype: DType = "auto"
    device: Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda or cuda:N.")] = (
        "auto"
    )
    engine: Engine = None

    def llm_options(self, ctx: typer.Context, **more: Any) -> dict[str, Any]:
        """Returns the options of LLM(), see engine_options."""
        return engine_options(ctx, self.engine, dtype=self.dtype, device=self.device, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """How every answer is generated."""

    thinking: Thinking = None
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Upper limit of generated tokens per answer.")
    ] = 1024
    reasoning_parser: Annotated[
        str,
        typer.Option(
            help="How to separate reasoning from the answer: auto (the model's own parser), none, "
            "or the name of a parser that `mmdeploy-llm plugins` lists."
        ),
    ] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Which items of a batch are run, and how results are written."""

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
            metavar="WHICH",
            help="With --resume: which items to retry: all (that failed), or outcomes and error "
            "codes, such as empty,truncated,408.",
        ),
    ] = "all"
    no_retry_failed: Annotated[
        bool,
        typer.Option("--no-retry-failed", help="With --resume: leave failed items as they are."),
    ] = False
    max_failures: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Stop after N failed items in this run.")
    ] = None
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N|auto",
            help="Process only every N-th item from the I-th on, so that N runs share the input. "
            "auto: as torchrun, SLURM or an indexed job of Kubernetes numbers this process; the "
            "shard then stands in the output's name.",
        ),
    ] = None
    limit: Limit = None
    format: Annotated[
        str | None,
        typer.Option(
            help="Format of the output: jsonl, parquet or webdataset.  [default: by its suffix]"
        ),
    ] = None
    part_items: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Items in a part of the output.  [default: 20000, of tars 10000]",
        ),
    ] = None
    journal: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Where this machine keeps results that are not uploaded yet, when --output is a "
            "URL.  [default: a folder NAME-DIGEST.journal here]",
        ),
    ] = None
    validate: Annotated[
        Path | None,
        typer.Option(
            metavar="SCHEMA",
            help="JSON schema that every answer must keep. One that breaks it is asked again, "
            "then recorded as an error with its text.",
        ),
    ] = None
    validate_retries: Annotated[
        int,
        typer.Option(
            min=0, metavar="K", help="How often an answer that breaks --validate is asked again."
        ),
    ] = VALIDATE_RETRIES
    engine_restarts: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="K",
            help="How often in a row an engine that died is started again. Its items are done "
            "again; one that was there at two deaths is done alone.",
        ),
    ] = ENGINE_RESTARTS
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Upper limit of items that run at the same time.")
    ] = None
    num_threads: NumThreads = None


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command an option for each field of those parameters that are dataclasses."""
    own = inspect.signature(command, eval_str=True).parameters
    groups: dict[str, Any] = {
        name: param.annotation for name, param in own.items() if is_dataclass(param.annotation)
    }

    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{each.name: given.pop(each.name) for each in fields(group)})
        command(**given)

    flat: list[inspect.Parameter] = []
    for name, param in own.items():
        group = groups.get(name)
        of_group = inspect.signature(group, eval_str=True).parameters.values() if group else [param]
        flat += [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in of_group]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    setattr(run, "__signature__", inspect.Signature(flat))  # noqa: B010  (mypy knows none such)
    return run


def output_mode(overwrite: bool, resume: bool) -> Mode:
    """Returns how to treat an existing output file. Raises ConfigError when both are set."""
    if overwrite and resume:
        raise ConfigError("--overwrite and --resume contradict each other; give one of them")
    return "overwrite" if overwrite else "resume" if resume else "new"


def template_kwargs(thinking: bool | None) -> dict[str, Any]:
    """Returns the variables for the chat template."""
    return {} if thinking is None else {"enable_thinking": thinking}


def sampling_params(**values: Any) -> SamplingParams:
    """Builds SamplingParams; imports pydantic only now."""
    from mmdeploy_llm.params import SamplingParams

    return SamplingParams(**values)


def engine_options(ctx: typer.Context, extra: list[str] | None, **options: Any) -> dict[str, Any]:
    """Returns the options of LLM(): the given ones without None, overridden by the NAME=VALUE
    texts of --engine and by the plugins that the environment selects (`ctx.obj`)."""
    parsed = dict(named_value("--engine", text, "max_model_len=4096") for text in extra or [])
    for name in ("reasoning_parser", "tool_call_parser"):
        if options.get(name) == "none":
            options[name] = None
    merged = {**options, **parsed, **ctx.obj}
    return {name: value for name, value in merged.items() if value is not None}


def named_value(option: str, text: str, example: str) -> tuple[str, Any]:
    """Parses NAME=VALUE; the value is read as JSON if it is JSON, else as text.

    Raises ConfigError without a name or "=". `option` and `example` are for its message.
    """
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ConfigError(f"{option} {text!r} must be NAME=VALUE, such as {example}")
    try:
        return name.replace("-", "_"), json.loads(value)
    except ValueError:
        return name.replace("-", "_"), value


def read_tools(path: Path | None) -> Any:
    """Reads the JSON file of --tools; None without one. Raises ConfigError if it is not JSON."""
    if path is None:
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tools {str(path)!r} cannot be read as JSON: {error}") from error


@contextmanager
def open_llm(model: str, options: Mapping[str, Any]) -> Iterator[LLM]:
    """Opens the model and closes it at the end of the block."""
    from mmdeploy_llm.llm import LLM

    with LLM(model=model, **{"quiet": True, **options}) as llm:
        yield llm


def open_answerer(
    model: str, options: Mapping[str, Any], cluster: str | None
) -> AbstractContextManager[Answerer]:
    """Opens the model in this process, or on the Ray cluster with this address."""
    if cluster is None:
        return open_llm(model, options)
    from mmdeploy_llm.ray import ClusterLLM

    return ClusterLLM(model, address=cluster, **options)


def open_async_llm(model: str, options: Mapping[str, Any]) -> AsyncLLM:
    """Opens the model for single requests."""
    from mmdeploy_llm.aio.async_llm import AsyncLLM

    return AsyncLLM(model, **{"quiet": True, **options})


def open_media(model: str, options: Mapping[str, Any]) -> MediaLoader:
    """Returns the model's media loader, without loading weights."""
    from mmdeploy_llm.config import EngineConfig
    from mmdeploy_llm.startup import media

    return media.open_media(EngineConfig.from_options(model, options))


def open_reader(model: str, options: Mapping[str, Any]) -> MediaLoader:
    """Returns a loader that reads media within the limits and needs no files of the model."""
    from mmdeploy_llm.config import EngineConfig
    from mmdeploy_llm.startup import media

    return media.open_reader(EngineConfig.from_options(model, options))


def print_error(message: str) -> None:
    """Prints one red line on standard error."""
    from .terminal import printable

    typer.secho(f"error: {printable(message)}", fg="red", err=True)
