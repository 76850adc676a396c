"""The commands of `mmdeploy-llm` together. Commands import their modules when they run, so that
--help is quick."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmdeploy_llm import __version__
from mmdeploy_llm.cli.commands.batches import embed
from mmdeploy_llm.cli.options.batch_help import BATCH_EPILOG, CAPTION_EPILOG
from mmdeploy_llm.cli.options.command import Command, CommandGroup
from mmdeploy_llm.cli.options.count_help import COUNT_EPILOG
from mmdeploy_llm.cli.options.transcribing import TRANSCRIBE_EPILOG
from mmdeploy_llm.cli.options.values import FROM_ENVIRONMENT
from mmdeploy_llm.cli.options.vector_help import DEDUPE_EPILOG, EMBED_EPILOG, SEARCH_EPILOG
from mmdeploy_llm.cli.terminal.interrupts import interrupted_code
from mmdeploy_llm.errors import ConfigError, MMDeployLLMError
from mmdeploy_llm.values.text.display import system_words

from . import cache_option, plugin_names
from .commands.batches import batch, caption
from .commands.bench import BENCH_EPILOG, bench
from .commands.count import count
from .commands.determinism import DETERMINISM_EPILOG, check_determinism
from .commands.doctor import DOCTOR_EPILOG, doctor
from .commands.exports import EXPORT_EPILOG, export
from .commands.jobs import MORE_WORDS, RUN_EPILOG, run
from .commands.merge import MERGE_EPILOG, merge
from .commands.plugins import LOAD_PLUGINS, plugins
from .commands.quantize import QUANTIZE_EPILOG, quantize
from .commands.read import EPILOG as READ_EPILOG
from .commands.read import read
from .commands.reports import REPORT_EPILOG, report
from .commands.search import dedupe, search
from .commands.talk import CHAT_EPILOG, GENERATE_EPILOG, chat, generate
from .commands.transcribe import transcribe
from .exits import STOPPED, USAGE, in_options, print_error

if TYPE_CHECKING:
    from mmdeploy_llm.hooks import PluginManager

OUT_OF_MEMORY = (
    "memory ran out; end other programs, or lower what is held at once: max_num_seqs, "
    "kv_cache_memory, the size of pictures, the rows of a corpus"
)

MAX_HELP_WIDTH = 100  # columns

# click does not rewrap a paragraph that begins with "\b".
EPILOG = """\b
Examples:
  mmdeploy-llm caption photos/ --model NAME      captions.jsonl and captions.html
  mmdeploy-llm batch prompts.jsonl --output answers.jsonl
  mmdeploy-llm generate "What is in this picture?" --image photo.jpg

\b
Without --model and MMDEPLOY_LLM_MODEL, commands ask which model is to work on
your files, and name some that fit this machine; --demo takes shapes-vl, a tiny
one inside the package that only knows drawings of coloured shapes. A model is
a folder or a Hugging Face id. `mmdeploy-llm COMMAND --help` explains a command.

\b
Plugins add models, processors, parsers and commands. `mmdeploy-llm plugins`
lists the installed ones, `mmdeploy-llm plugins new` writes a new one."""


VERSION_EPILOG = """\b
Examples:
  mmdeploy-llm version
  mmdeploy-llm --version
  mmdeploy-llm doctor           with the versions of everything else"""


class PrintableFormatter(logging.Formatter):
    """Formats messages without characters that control the terminal: some quote untrusted text."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the text of the message and of its traceback."""
        from mmdeploy_llm.cli.terminal.letters import printable

        return printable(super().format(record))


class Program(CommandGroup):
    """Holds the built-in commands, loads those of plugins on demand, and prints errors in one
    line."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns a built-in command, else a plugin's; plugins cannot replace built-in ones."""
        found = self.commands.get(cmd_name)
        if found is None and has_other_plugins():
            return self._plugin_commands().get(cmd_name)
        return found

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the names for --help. Loads plugins only when another package provides some,
        since this package's own plugins add no commands."""
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
        """Runs the command; prints an error that the user can fix in one line, no traceback."""
        try:
            return super().invoke(ctx)
        except (MMDeployLLMError, OSError) as error:
            if ctx.params.get("debug"):
                raise
            message = words_of(error)
            if isinstance(error, ConfigError):
                message = in_options(message, self.commands.get(ctx.invoked_subcommand))
            print_error(message)
            raise typer.Exit(_exit_code(error)) from None
        except KeyboardInterrupt:
            raise typer.Exit(interrupted_code()) from None
        except typer.Exit:  # which is a RuntimeError
            raise
        except (MemoryError, RuntimeError) as error:
            from mmdeploy_llm.layers.attention.out_of_memory import is_out_of_memory

            if ctx.params.get("debug") or not is_out_of_memory(error):
                raise
            print_error(OUT_OF_MEMORY)
            raise typer.Exit(USAGE) from None


def words_of(error: Exception) -> str:
    """Returns what an error says, and what to do about what the system refused."""
    from mmdeploy_llm.data.records.files import OutputWriteError

    if isinstance(error, OutputWriteError) and error.filename is None:  # it says what to do
        return error.strerror or str(error)
    return system_words(error) if isinstance(error, OSError) else str(error)


def _exit_code(error: Exception) -> int:
    from mmdeploy_llm.data.records.files import OutputLostError, OutputWriteError

    return STOPPED if isinstance(error, (OutputLostError, OutputWriteError)) else USAGE


app = typer.Typer(
    cls=Program,
    name="mmdeploy-llm",
    epilog=EPILOG,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": MAX_HELP_WIDTH,
    },
)


@app.callback(invoke_without_command=True)
def program(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log progress, such as loading and memory.")
    ] = False,
) -> None:
    """Run multimodal language models offline: caption folders of images, answer files of prompts,
    or chat about a picture.

    --verbose and --debug may stand after the command too: mmdeploy-llm caption photos --verbose
    """
    ctx.obj = plugin_names()
    ctx.meta[FROM_ENVIRONMENT] = cache_option()
    ctx.meta[LOAD_PLUGINS] = load_plugins
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("%(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])
    if version:
        typer.echo(__version__)
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


app.command(cls=Command, epilog=CAPTION_EPILOG)(caption)
app.command(cls=Command, epilog=BATCH_EPILOG)(batch)
app.command(cls=Command, epilog=READ_EPILOG)(read)
app.command(cls=Command, epilog=TRANSCRIBE_EPILOG)(transcribe)
app.command(cls=Command, epilog=EMBED_EPILOG)(embed)
app.command(cls=Command, epilog=SEARCH_EPILOG)(search)
app.command(cls=Command, epilog=DEDUPE_EPILOG)(dedupe)
app.command(cls=Command, epilog=RUN_EPILOG, context_settings=MORE_WORDS)(run)
app.command(cls=Command, epilog=REPORT_EPILOG)(report)
app.command(cls=Command, epilog=EXPORT_EPILOG)(export)
app.command(cls=Command, epilog=GENERATE_EPILOG)(generate)
app.command(cls=Command, epilog=CHAT_EPILOG)(chat)
app.command(cls=Command, epilog=COUNT_EPILOG)(count)
app.command(cls=Command, epilog=BENCH_EPILOG)(bench)
app.command(cls=Command, epilog=QUANTIZE_EPILOG)(quantize)
app.command(cls=Command, epilog=MERGE_EPILOG)(merge)
app.command(cls=Command, epilog=DOCTOR_EPILOG)(doctor)
app.command("check-determinism", cls=Command, epilog=DETERMINISM_EPILOG)(check_determinism)

app.add_typer(plugins)


@app.command(cls=Command, epilog=VERSION_EPILOG)
def version() -> None:
    """Print the version of mmdeploy-llm."""
    typer.echo(__version__)


def load_plugins(**chosen: Any) -> PluginManager:
    """Loads the plugins that the environment selects, and those of options of PluginChoice."""
    from mmdeploy_llm.hooks import PluginManager
    from mmdeploy_llm.values.options.plugin_choice import PluginChoice

    return PluginManager.of(PluginChoice(**plugin_names(), **chosen))


def has_other_plugins() -> bool:
    """Returns whether a package other than this one provides plugins; imports none of them."""
    from mmdeploy_llm.hooks.discovery import discover

    return not all(plugin.origin.is_builtin for plugin in discover().plugins)
