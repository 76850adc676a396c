"""The `mmdeploy-llm` program. The only place that reads environment variables:

MMDEPLOY_LLM_PLUGINS          load exactly these plugins (names with commas; empty: none)
MMDEPLOY_LLM_BLOCKED_PLUGINS  do not load these

Exit codes: 0 all good, 1 some items failed, 2 a wrong call or a model that cannot be used, 3
stopped by --max-failures, 130 stopped with Ctrl-C. Commands import what they need when they run,
so that --help is quick.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from mmdeploy_llm import __version__
from mmdeploy_llm.errors import MMDeployLLMError

from .batches import BATCH_EPILOG, CAPTION_EPILOG, batch, caption
from .bench import BENCH_EPILOG, bench
from .options import INTERRUPTED, USAGE, print_error
from .plugins import LOAD_PLUGINS, plugins
from .talk import chat, generate

if TYPE_CHECKING:
    from mmdeploy_llm.hooks import PluginManager

PLUGINS_VARIABLE = "MMDEPLOY_LLM_PLUGINS"
BLOCKED_VARIABLE = "MMDEPLOY_LLM_BLOCKED_PLUGINS"
OUR_DISTRIBUTION = "mmdeploy-llm"

# "\b" keeps the lines below it as they are.
EPILOG = """\b
Examples:
  mmdeploy-llm caption photos/ --output captions.jsonl
  mmdeploy-llm caption "photos/**/*.jpg" --thinking --max-tokens 200
  mmdeploy-llm batch prompts.jsonl --output answers.jsonl
  mmdeploy-llm generate "What is in this picture?" --image photo.jpg
  mmdeploy-llm chat --image photo.jpg
  mmdeploy-llm bench
  mmdeploy-llm COMMAND --help

Installed plugins may add commands; `mmdeploy-llm plugins` lists what they provide,
`mmdeploy-llm plugins new` starts one."""


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


@app.callback(invoke_without_command=True)
def program(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens.")] = False,
) -> None:
    """Offline multimodal inference: captions for folders of images, batches, answers, chats."""
    ctx.obj = plugin_names()
    ctx.meta[LOAD_PLUGINS] = load_plugins
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s: %(message)s"
    )
    if version:
        typer.echo(__version__)
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


app.command(epilog=CAPTION_EPILOG)(caption)
app.command(epilog=BATCH_EPILOG)(batch)
app.command()(generate)
app.command()(chat)
app.command(epilog=BENCH_EPILOG)(bench)

app.add_typer(plugins)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """Runs the program; the console script."""
    app()


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
    from mmdeploy_llm.hooks import PluginManager

    names = plugin_names()
    return PluginManager.load(names.get("plugins"), names.get("blocked_plugins", ()))


def has_other_plugins() -> bool:
    """Whether a package other than this one brings plugins; imports none."""
    owners = (point.dist for point in metadata.entry_points(group="mmdeploy_llm"))
    return any(owner is not None and owner.name != OUR_DISTRIBUTION for owner in owners)
