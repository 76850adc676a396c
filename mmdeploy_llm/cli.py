"""The `mmdeploy-llm` program. The only place that reads environment variables:

MMDEPLOY_LLM_PLUGINS          load exactly these plugins (names with commas; empty: none)
MMDEPLOY_LLM_BLOCKED_PLUGINS  do not load these

Exit codes: 0 all good, 1 some items failed, 2 a wrong call or a model that cannot be used,
130 stopped with Ctrl-C. Commands import what they need when they run, so that --help is quick.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from . import __version__
from .errors import ConfigError, MMDeployLLMError

if TYPE_CHECKING:
    from .batch.captioning import CaptionJob, JobResult
    from .batch.writer import Mode
    from .hooks import PluginManager
    from .llm import LLM
    from .params import SamplingParams

PLUGINS_VARIABLE = "MMDEPLOY_LLM_PLUGINS"
BLOCKED_VARIABLE = "MMDEPLOY_LLM_BLOCKED_PLUGINS"
OUR_DISTRIBUTION = "mmdeploy-llm"
SOME_FAILED, USAGE, INTERRUPTED = 1, 2, 130
CHAT_IMAGES = 16  # pictures in one conversation, unless --engine says otherwise

# "\b" keeps the lines below it as they are.
EPILOG = """\b
Examples:
  mmdeploy-llm caption photos/ --output captions.jsonl
  mmdeploy-llm caption "photos/**/*.jpg" --thinking --max-tokens 200
  mmdeploy-llm generate "What is in this picture?" --image photo.jpg
  mmdeploy-llm chat --image photo.jpg
  mmdeploy-llm COMMAND --help

Installed plugins may add commands; `mmdeploy-llm plugins` lists what they provide."""

CAPTION_EPILOG = """\b
Examples:
  mmdeploy-llm caption photos/ extra.png
  mmdeploy-llm caption photos/ -r -p "Write one sentence for a blind reader."
  mmdeploy-llm caption photos/ --resume     what an earlier run has left
  mmdeploy-llm caption photos/ --model baidu/ERNIE-4.5-VL-28B-A3B-PT
  mmdeploy-llm caption photos/ --engine max_model_len=8192

\b
Exit codes: 0 all captioned, 1 some failed, 2 a wrong call or model,
130 stopped with Ctrl-C."""


class Program(TyperGroup):
    """The built-in commands and, once they are needed, those of plugins; errors in one line."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A built-in command, else one of a plugin. Built-in ones cannot be replaced."""
        return self.commands.get(cmd_name) or self._plugin_commands().get(cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        """For --help. This package's own plugins add none, so without others nothing is loaded."""
        names = list(self.commands)
        if not has_other_plugins():
            return names
        try:
            return [*names, *(name for name in self._plugin_commands() if name not in names)]
        except MMDeployLLMError as error:  # --help must work when a plugin does not
            print_error(str(error))
            return names

    def _plugin_commands(self) -> Mapping[str, Any]:
        extra = typer.Typer()
        load_plugins().extend_cli(extra)
        if not extra.registered_commands and not extra.registered_groups:
            return {}
        return typer.main.get_group(extra).commands

    def invoke(self, ctx: Any) -> Any:
        """Runs the command. What a user can set right is one line, without a traceback."""
        try:
            return super().invoke(ctx)
        except (MMDeployLLMError, OSError) as error:
            if ctx.params.get("debug"):
                raise
            print_error(str(error))
            raise typer.Exit(USAGE) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=Program,
    name="mmdeploy-llm",
    epilog=EPILOG,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[
    str, typer.Option("--model", "-m", help="Folder, hub id or name of a bundled model.")
]
Parser = Annotated[
    str,
    typer.Option(help="Splits off reasoning: a parser's name, auto: the model's own, none."),
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

Paths = Annotated[list[str], typer.Argument(help="Images, folders of images, globs.")]
Question = Annotated[str, typer.Option("--prompt", "-p", help="What to ask about each image.")]
Output = Annotated[
    Path, typer.Option("--output", "-o", help="JSONL, a line for each image as it finishes.")
]
Report = Annotated[
    Path | None, typer.Option(help="HTML page.  [default: as --output, ending in .html]")
]
NoReport = Annotated[bool, typer.Option("--no-report", help="Write no HTML page.")]
HasTable = Annotated[bool, typer.Option("--table", help="End with a table of results.")]
Recursive = Annotated[bool, typer.Option("--recursive", "-r", help="Look into subfolders too.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Keep the output, do what is missing or failed.")
]
NumSeqs = Annotated[
    int | None, typer.Option(min=1, help="Images that are worked on at the same time.")
]
NumThreads = Annotated[int | None, typer.Option(min=1, help="CPU threads to compute.")]


@app.callback(invoke_without_command=True)
def program(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens.")] = False,
) -> None:
    """Offline multimodal inference: captions for folders of images, answers, chats."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s: %(message)s"
    )
    if version:
        typer.echo(__version__)
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@app.command(epilog=CAPTION_EPILOG)
def caption(
    paths: Paths,
    model: Model = "shapes-vl",
    prompt: Question = "Describe the image.",
    output: Output = Path("captions.jsonl"),
    report: Report = None,
    no_report: NoReport = False,
    table: HasTable = False,
    recursive: Recursive = False,
    overwrite: Overwrite = False,
    resume: Resume = False,
    thinking: Thinking = None,
    max_tokens: MaxTokens = 1024,
    temperature: Temperature = 0.0,
    reasoning_parser: Parser = "auto",
    dtype: DType = "auto",
    device: Device = "auto",
    max_num_seqs: NumSeqs = None,
    num_threads: NumThreads = None,
    engine: Engine = None,
) -> None:
    """Caption images, with an HTML report.

    Every caption is written to a JSONL file as soon as it is there; what is wrong with an image
    is said in its line and harms no other."""
    from .batch.captioning import plan_job, run_job
    from .batch.run import CaptionTask

    task = CaptionTask(
        prompt=prompt,
        sampling_params=sampling_params(max_tokens=max_tokens, temperature=temperature),
        chat_template_kwargs=template_kwargs(thinking),
    )
    job = plan_job(paths, output, output_mode(overwrite, resume), task, is_recursive=recursive)
    options = engine_options(
        engine,
        dtype=dtype,
        device=device,
        max_num_seqs=max_num_seqs,
        num_threads=num_threads,
        reasoning_parser=reasoning_parser,
    )
    result = run_job(job, lambda: open_llm(model, options))
    page = None if no_report else report or output.with_suffix(".html")
    finish_caption(job, result, page, model, options, is_table_shown=table)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads it from standard input.")],
    image: Image = None,
    model: Model = "shapes-vl",
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Continue PROMPT as it is, without the model's chat template."),
    ] = False,
    thinking: Thinking = None,
    max_tokens: MaxTokens = 1024,
    temperature: Temperature = 0.0,
    reasoning_parser: Parser = "auto",
    dtype: DType = "auto",
    device: Device = "auto",
    engine: Engine = None,
) -> None:
    """Answer one prompt.

    The answer goes to standard output, reasoning to standard error."""
    from .terminal import make_console, print_answer, user_message

    text, images = sys.stdin.read() if prompt == "-" else prompt, image or []
    request: dict[str, Any] = {"prompt": text, "multimodal_data": {"image": images}}
    if not raw:
        message = user_message(text, images)
        request = {"messages": [message], "chat_template_kwargs": template_kwargs(thinking)}
    options = engine_options(
        engine,
        dtype=dtype,
        device=device,
        reasoning_parser=reasoning_parser,
        limit_mm_per_prompt={"image": max(1, len(images))},
    )
    params = sampling_params(max_tokens=max_tokens, temperature=temperature)
    with open_llm(model, options) as llm:
        outputs = llm.stream(request, params)
        _, error = print_answer(outputs, make_console(), make_console(is_stderr=True))
    if error is not None:
        print_error(error)
        raise typer.Exit(SOME_FAILED)


@app.command()
def chat(
    message: Annotated[str | None, typer.Option(help="Say this, print the answer and end.")] = None,
    image: Image = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    model: Model = "shapes-vl",
    thinking: Thinking = None,
    max_tokens: MaxTokens = 1024,
    temperature: Temperature = 0.0,
    reasoning_parser: Parser = "auto",
    dtype: DType = "auto",
    device: Device = "auto",
    engine: Engine = None,
) -> None:
    """Talk with a model about pictures.

    Lines come from the terminal or a pipe; /image PATH adds a picture, /reset forgets, /quit
    ends."""
    from .terminal import CHAT_HELP, ChatSession, make_console

    options = engine_options(
        engine,
        dtype=dtype,
        device=device,
        reasoning_parser=reasoning_parser,
        limit_mm_per_prompt={"image": CHAT_IMAGES},
    )
    params = sampling_params(max_tokens=max_tokens, temperature=temperature)
    out, aside = make_console(), make_console(is_stderr=True)
    with open_llm(model, options) as llm:
        kwargs = template_kwargs(thinking)
        session = ChatSession(
            llm, params, out=out, aside=aside, system=system, template_kwargs=kwargs
        )
        for path in image or []:
            session.add_image(path)
        if message is None and sys.stdin.isatty():
            typer.echo(f"{model}: {CHAT_HELP}", err=True)
        session.run(typed_lines() if message is None else [message])
    if session.num_failed:
        raise typer.Exit(SOME_FAILED)


@app.command()
def plugins(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="End with exit code 1 when a plugin failed.")
    ] = False,
) -> None:
    """List plugins, what they provide, and what failed."""
    from .terminal import make_console, plugin_table

    with quiet_plugins():  # the failures stand in the list itself
        manager = load_plugins()
        manager.extend_cli(typer.Typer())
    if as_json:
        typer.echo(json.dumps([asdict(plugin) for plugin in manager.plugins], indent=2))
    else:
        make_console().print(plugin_table(manager.plugins))
    known = {failure for plugin in manager.plugins for failure in plugin.failures}
    for failure in manager.failures:
        if failure not in known and not as_json:
            print_error(str(failure))
    if strict and manager.failures:
        raise typer.Exit(SOME_FAILED)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """Runs the program; the console script."""
    app()


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
    from .params import SamplingParams

    return SamplingParams(**values)


def engine_options(extra: list[str] | None, **options: Any) -> dict[str, Any]:
    """The options of LLM(): those given by name, overridden by NAME=VALUE texts; None is left to
    the engine. Values are read as JSON where they are JSON, else as text."""
    parsed = dict(_engine_option(text) for text in extra or [])
    if options.get("reasoning_parser") == "none":
        options["reasoning_parser"] = None
    return {name: value for name, value in {**options, **parsed}.items() if value is not None}


def _engine_option(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ConfigError(f"--engine {text!r} must be NAME=VALUE, such as max_model_len=4096")
    try:
        return name.replace("-", "_"), json.loads(value)
    except ValueError:
        return name.replace("-", "_"), value


@contextmanager
def open_llm(model: str, options: Mapping[str, Any]) -> Iterator[LLM]:
    """The model, closed in the end."""
    from .llm import LLM

    with LLM(model=model, **options, **plugin_names()) as llm:
        yield llm


def plugin_names() -> dict[str, Any]:
    """`plugins` and `blocked_plugins` as the environment says, where it says something."""
    names: dict[str, Any] = {}
    for option, variable in (("plugins", PLUGINS_VARIABLE), ("blocked_plugins", BLOCKED_VARIABLE)):
        value = os.environ.get(variable)
        if value is not None:
            names[option] = tuple(part.strip() for part in value.split(",") if part.strip())
    return names


def load_plugins() -> PluginManager:
    """The plugins of this program run."""
    from .hooks import PluginManager

    names = plugin_names()
    return PluginManager.load(names.get("plugins"), names.get("blocked_plugins", ()))


def has_other_plugins() -> bool:
    """Whether a package other than this one brings plugins; imports none."""
    owners = (point.dist for point in metadata.entry_points(group="mmdeploy_llm"))
    return any(owner is not None and owner.name != OUR_DISTRIBUTION for owner in owners)


@contextmanager
def quiet_plugins() -> Iterator[None]:
    """Holds back the warnings about plugins."""
    logger = logging.getLogger("mmdeploy_llm.hooks")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def typed_lines() -> Iterator[str]:
    """Lines of a terminal, with a prompt and line editing, or of a pipe."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    while True:
        try:
            yield input("> ")
        except EOFError:
            return


def print_error(message: str) -> None:
    """One clear red line on standard error."""
    from .terminal import printable

    typer.secho(f"error: {printable(message)}", fg="red", err=True)


def finish_caption(
    job: CaptionJob,
    result: JobResult,
    page: Path | None,
    model: str,
    options: Mapping[str, Any],
    *,
    is_table_shown: bool,
) -> None:
    """Report, table and last words of a captioning job; ends the program with its exit code."""
    from .batch.captioning import ReportSettings, report_job, settings_of
    from .terminal import caption_summary, caption_table, make_console

    if page is not None:
        # mypy cannot follow the renamed folder of an editable install.
        from mmdeploy_llm_processors.image.thumbnail import (  # type: ignore[import-not-found]
            thumbnail,
        )

        about = ReportSettings(model=model, version=__version__, settings=settings_of(job, options))
        report_job(job, result, page, about, thumbnail)
    if is_table_shown:
        make_console().print(caption_table(result.records))
        typer.echo()
    typer.echo(caption_summary(job, result))
    typer.echo(f"captions: {job.output}" + (f"\nreport:   {page}" if page else ""))
    if result.summary.is_interrupted:
        left = len(job.images) - sum(record.is_ok for record in result.records)
        typer.echo(f"stopped with {left} left; the same command with --resume does them", err=True)
        raise typer.Exit(INTERRUPTED)
    if result.num_failed:
        typer.echo(f"{result.num_failed} failed: their lines say why, --resume tries them again")
        raise typer.Exit(SOME_FAILED)
