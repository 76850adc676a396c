"""`mmdeploy-llm plugins`: lists installed plugins, checks their contract, writes new packages."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from mmdeploy_llm.cli.exits import SOME_FAILED, print_error
from mmdeploy_llm.cli.options.command import Command, CommandGroup
from mmdeploy_llm.cli.options.groups import Given, Rows, with_groups
from mmdeploy_llm.values.options.engine_flags import EngineFlags

if TYPE_CHECKING:
    from rich.table import Table

    from mmdeploy_llm.hooks import PluginInfo, PluginManager
    from mmdeploy_llm.testing.verdicts import Verdict

LOAD_PLUGINS = f"{__name__}.load"  # key of the program's plugin loader in the context's meta
COLOURS = {"pass": "green", "fail": "red", "skip": "yellow"}

EPILOG = """\b
Examples:
  mmdeploy-llm plugins                           list what is installed
  mmdeploy-llm plugins list --json
  mmdeploy-llm plugins check reasoning
  mmdeploy-llm plugins new acme --kind reasoning-parser    write the package acme-llm
  mmdeploy-llm plugins new acme --kind vision-model

\b
MMDEPLOY_LLM_PLUGINS=acme,sources      load only these plugins
MMDEPLOY_LLM_BLOCKED_PLUGINS=acme      do not load these"""

EPILOG_LIST = """\b
Examples:
  mmdeploy-llm plugins list
  mmdeploy-llm plugins list --plugin my_plugin.py
  mmdeploy-llm plugins list --json
  mmdeploy-llm plugins list --strict             exit code 1 when one is broken"""

EPILOG_CHECK = """\b
Examples:
  mmdeploy-llm plugins check reasoning
  mmdeploy-llm plugins check acme --model models/acme-vl
  mmdeploy-llm plugins check ./my_plugin.py
  mmdeploy-llm plugins check sources --json"""

EPILOG_NEW = """\b
Examples:
  mmdeploy-llm plugins new acme --kind reasoning-parser    write the package acme-llm
  mmdeploy-llm plugins new acme --kind vision-model
  mmdeploy-llm plugins new acme --kind fetcher --directory packages/
  mmdeploy-llm plugins new acme --from models/acme-7b    what does this checkpoint need?"""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Strict = Annotated[
    bool, typer.Option("--strict", help="Exit with code 1 when a plugin failed to load.")
]

plugins = typer.Typer(
    name="plugins",
    cls=CommandGroup,
    help="List installed plugins, check one, or write a new one.",
    epilog=EPILOG,
    rich_markup_mode=None,
)


@plugins.callback(invoke_without_command=True)
@with_groups
def default(
    ctx: typer.Context,
    *,
    as_json: AsJson = False,
    strict: Strict = False,
    chosen: Annotated[Given, Rows(EngineFlags, "plugin_files")],
) -> None:
    """List installed plugins (the default), check one, or write a new one."""
    if ctx.invoked_subcommand is None:
        show_plugins(ctx, chosen, as_json=as_json, strict=strict)


@plugins.command("list", cls=Command, epilog=EPILOG_LIST)
@with_groups
def list_plugins(
    ctx: typer.Context,
    as_json: AsJson = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a Markdown table of model architectures.")
    ] = False,
    strict: Strict = False,
    *,
    chosen: Annotated[Given, Rows(EngineFlags, "plugin_files", "use")],
) -> None:
    """List installed plugins, what they provide, and their errors."""
    show_plugins(ctx, chosen, as_json=as_json, markdown=markdown, strict=strict)


def show_plugins(
    ctx: typer.Context, chosen: Given, *, as_json: bool, strict: bool, markdown: bool = False
) -> None:
    """Prints plugins. chosen: options of PluginChoice."""
    from mmdeploy_llm.cli.terminal.output import print_table

    manager = _load(ctx, chosen)
    if as_json:
        found = [_record(manager, item) for item in manager.plugins]
        typer.echo(json.dumps(found, indent=2, default=_as_text))  # first bytes of files
    elif markdown:
        from mmdeploy_llm.testing.scaffold.architectures import table

        typer.echo(table(manager))
    else:
        print_table(_plugin_table(manager))
    known = {failure for plugin in manager.plugins for failure in plugin.failures}
    for failure in manager.failures:
        if failure not in known and not as_json:
            print_error(str(failure))
    if strict and manager.failures:
        raise typer.Exit(SOME_FAILED)


@plugins.command(cls=Command, epilog=EPILOG_CHECK)
@with_groups
def check(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME|FILE", help="Name of an installed plugin, or a Python file."),
    ],
    model: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder of a checkpoint; without it, checks that build a model are skipped.",
        ),
    ] = None,
    *,
    chosen: Annotated[Given, Rows(EngineFlags, "plugin_files")],
    as_json: AsJson = False,
) -> None:
    """Check that a plugin keeps its contract.

    Prints pass, fail or skip for each check; exits with code 1 when one fails.
    """
    from mmdeploy_llm.testing.plugins.installed import check_name

    check_name(name)  # before torch is imported
    from mmdeploy_llm.testing.check import check_plugin

    verdicts: list[Verdict] = []
    with quiet_plugins():
        for verdict in check_plugin(name, model_folder=model, **chosen):
            verdicts.append(verdict)
            if not as_json:
                _print_verdict(verdict)
    counts = Counter[str](verdict.outcome for verdict in verdicts)
    if as_json:
        typer.echo(json.dumps([asdict(verdict) for verdict in verdicts], indent=2))
    else:
        passed, failed, skipped = (counts[outcome] for outcome in COLOURS)
        typer.echo(f"{name}: {passed} passed, {failed} failed, {skipped} skipped")
    if counts["fail"]:
        raise typer.Exit(SOME_FAILED)


@plugins.command(cls=Command, epilog=EPILOG_NEW)
def new(
    name: Annotated[str, typer.Argument(help="Name of the plugin, such as acme.")],
    kind: Annotated[
        str | None,
        typer.Option(
            help="What the plugin provides: model, vision-model, reasoning-parser, tool-parser, "
            "logits-processor, media-kind (items that are several images each), "
            "media-processor (items with tensors of their own), fetcher, observer, corpus-format, "
            "output-sink, attention-backend, weight-format or chat-part."
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--from",
            exists=True,
            file_okay=False,
            metavar="FOLDER",
            help="Begin with the model of a checkpoint: say which parts it needs, and write those "
            "that are known. Reads its config and words, no weights.",
        ),
    ] = None,
    media: Annotated[
        str | None,
        typer.Option(help="image: the same as --kind vision-model."),
    ] = None,
    directory: Annotated[
        Path, typer.Option("--directory", "-d", help="Folder in which to create the package.")
    ] = Path(),
) -> None:
    """Write the package of a new plugin that works: code, tests, README.

    Existing files are never overwritten.
    """
    from mmdeploy_llm.cli.terminal.letters import printable
    from mmdeploy_llm.testing.scaffold import write_package

    made = write_package(name, kind, directory, media=media, checkpoint=checkpoint)
    for line in made.findings:
        typer.echo(printable(line))
    typer.echo(f"{made.folder}: {made.summary}")
    for file in made.files:
        typer.echo(f"  {file}")
    typer.echo("Next:")
    for step in made.steps:
        typer.echo(f"  {step}")


@contextmanager
def quiet_plugins() -> Iterator[None]:
    """Suppresses log messages about plugins; the command prints failures itself."""
    logger = logging.getLogger("mmdeploy_llm.hooks")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _load(ctx: typer.Context, chosen: Given) -> PluginManager:
    """Loads the plugins with the program's loader; their failures appear in the listing."""
    load = cast("Callable[..., PluginManager]", ctx.meta[LOAD_PLUGINS])
    with quiet_plugins():
        manager = load(**chosen)
        manager.extend_cli(typer.Typer())
    return manager


def _record(manager: PluginManager, plugin: PluginInfo) -> Mapping[str, Any]:
    """Returns a plugin as JSON values: its PluginInfo, every spec that it provides, and which of
    them another plugin serves."""
    from mmdeploy_llm.hooks.validation import PROVIDED
    from mmdeploy_llm.testing.scaffold.rivals import rivals_of

    provided: Mapping[str, Any] = PROVIDED  # mypy knows no union of types that is a SpecT
    own = {
        hook.removeprefix("provide_"): [
            asdict(spec) for spec in manager.provided(kind) if manager.owner(spec) == plugin.name
        ]
        for hook, kind in provided.items()
    }
    return {**asdict(plugin), **own, "served_by_others": rivals_of(manager, plugin.name)}


def _plugin_table(manager: PluginManager) -> Table:
    """Builds a table: name, package and version, what each plugin provides; failures in red."""
    from rich.table import Table
    from rich.text import Text

    from mmdeploy_llm.testing.scaffold.rivals import rivals_of

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("plugin", "package", "provides"):
        table.add_column(title, overflow="fold")
    for plugin in manager.plugins:
        served = {
            f"model {spec.name}": ", ".join(map(_architecture, spec.architectures))
            for spec in manager.models
            if manager.owner(spec) == plugin.name
        }
        package = " ".join(part for part in (plugin.distribution, plugin.version) if part)
        lines = [f"{item}: {served[item]}" if item in served else item for item in plugin.provides]
        cell = Text("\n".join(lines))
        for line in rivals_of(manager, plugin.name):
            cell.append(f"\n{line}", style="yellow")
        for warning in plugin.warnings:
            cell.append(f"\n{warning}", style="yellow")
        for failure in plugin.failures:
            cell.append("\n" if cell else "")
            cell.append(f"{failure.phase} failed: {failure.error}", style="red")
        table.add_row(Text(plugin.name), Text(package or plugin.module), cell)
    return table


def _architecture(name: str) -> str:
    from mmdeploy_llm.hooks.selection import ANY_MODEL

    return "any other architecture" if name == ANY_MODEL else name


def _print_verdict(verdict: Verdict) -> None:
    from mmdeploy_llm.cli.terminal.letters import printable

    outcome = typer.style(f"{verdict.outcome:4}", fg=COLOURS[verdict.outcome])
    seconds = f" ({verdict.seconds:.1f} s)" if verdict.seconds >= 1 else ""
    subject = f"{verdict.subject}: " if verdict.subject else ""
    typer.echo(f"{outcome}  {subject}{verdict.check}{seconds}")
    if verdict.message:
        typer.echo("\n".join(f"      {line}" for line in printable(verdict.message).splitlines()))


def _as_text(value: object) -> str:
    """Returns bytes as Python writes them, and anything else that JSON does not have as text."""
    if isinstance(value, type):
        return value.__name__  # of a key of a part
    return ascii(value)[2:-1] if isinstance(value, bytes) else str(value)
