"""Commands of the program: options that are given twice are refused, and --help fits two screens.

--help lists the arguments, the usual options by theme and three examples. --help-all lists all
options with their whole texts, and the command's notes. An option is a rare one if it is declared
`hidden`; the theme is that of its group. Where everything fits two screens, --help shows it all.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from .batch_help import filled

TWO_SCREENS = 50  # lines
NUM_EXAMPLES = 3
DEFAULT_TITLE = "Options"
EXAMPLES = "\b\nExamples:\n"
NAMES_WIDTH = 24
EXPLANATION = re.compile(r": |; | \(|,? such as ")
MIN_SENTENCE = 15  # characters before an explanation
FIRST_SENTENCE = re.compile(r"(.*?)\.(?=\s|$)", re.DOTALL)
WRITTEN_DEFAULT = re.compile(r"\[default: ([^]]*)\]")
HELP_ALL = "--help-all"
HEARD = ("verbose", "debug")  # options of the program


class Command(TyperCommand):
    """A command of the program. Options of the program that say how it reports, HEARD, are taken
    after its name too."""

    def make_parser(self, ctx: Any) -> Any:
        """Returns the parser, which knows options of the program too."""
        parser, own = super().make_parser(ctx), {name for each in self.params for name in each.opts}
        for param in ctx.find_root().command.params:
            if param.name in HEARD and not own.intersection(param.opts):
                param.add_to_parser(parser, ctx)
        return parser

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the words of the command. Refuses an option that holds one value and has two."""
        if HELP_ALL in args and "--" not in args[: args.index(HELP_ALL)]:
            typer.echo(help_text(self, ctx, is_whole=True), color=ctx.color)
            raise typer.Exit
        try:
            given, _, order = self.make_parser(ctx).parse_args(args=list(args))
        except Exception as error:
            self._hint(error)
            raise
        for name in repeated(order):
            ctx.fail(f"{name} is given twice; it has one value: give it once")
        _hear(ctx.find_root(), given)
        return super().parse_args(ctx, args)

    def _hint(self, error: Any) -> None:
        """Adds to click's NoSuchOption, which typer keeps in a private module, where a name of the
        library is given: not all of them are options of their own."""
        name = str(getattr(error, "option_name", None) or "").lstrip("-").replace("-", "_")
        own = {param.name for param in self.params}
        where = next((option for option in elsewhere(name) if option in own), None)
        if name and where is not None and type(error).__name__ == "NoSuchOption":
            error.message += f"; give --{where} {name}=VALUE"
            error.possibilities = None

    def get_help(self, ctx: Any) -> str:
        """Returns what --help prints: everything if it fits two screens, else the usual."""
        whole = help_text(self, ctx, is_whole=True)
        return whole if whole.count("\n") < TWO_SCREENS else help_text(self, ctx, is_whole=False)


def _hear(root: Any, given: Mapping[str, Any]) -> None:
    """Does what options of the program say that stand after a command."""
    root.params.update({name: True for name in HEARD if given.get(name)})
    if root.params.get("verbose"):
        logging.getLogger().setLevel(logging.INFO)


class CommandGroup(TyperGroup):
    """A group of commands, whose help begins with the examples of its epilog."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the help."""
        examples, _, notes = (self.epilog or "").partition("\n\n")
        self.format_usage(ctx, formatter)
        formatter.write_paragraph()
        formatter.write_text(examples)
        self.format_help_text(ctx, formatter)
        self.format_options(ctx, formatter)
        formatter.write_paragraph()
        formatter.write_text(notes)


def elsewhere(name: str) -> Iterator[str]:
    """Yields the options that take a name of the library with its value."""
    from mmdeploy_llm.values.options.config import EngineConfig  # which imports all of pydantic
    from mmdeploy_llm.values.params import SamplingParams

    classes: dict[str, Any] = {"engine": EngineConfig, "sampling": SamplingParams}
    yield from (option for option, own in classes.items() if name in own.model_fields)


def repeated(order: Iterable[Any]) -> Iterator[str]:
    """Yields the options that were given twice, of those that hold one value. A flag says the same
    twice, unless it has an opposite."""
    seen = set()
    for param in order:
        is_single = param.param_type_name == "option" and not param.multiple and not param.count
        if is_single and param in seen and (not param.is_flag or param.secondary_opts):
            yield " / ".join([max(param.opts, key=len), *param.secondary_opts])
        seen.add(param)


def help_text(command: Any, ctx: Any, *, is_whole: bool) -> str:
    """Returns the help of a command. is_whole: with rare options, whole texts and notes."""
    formatter = ctx.make_formatter()
    command.format_usage(ctx, formatter)
    first, _, rest = (command.help or "").partition("\n\n")
    examples, notes = _split(filled(command.epilog or ""))
    formatter.write_paragraph()
    formatter.write_text(first)
    if examples:
        _write_section(formatter, "Examples", examples if is_whole else examples[:NUM_EXAMPLES])
    if is_whole and rest:
        formatter.write_paragraph()
        formatter.write_text(rest)
    num_left = _write_options(command, ctx, formatter, is_whole=is_whole)
    if is_whole and notes:
        formatter.write_paragraph()
        formatter.write_text(notes)
    elif not is_whole:
        formatter.write_paragraph()
        formatter.write_text(
            f"{ctx.command_path} {HELP_ALL}: {num_left} more options, whole texts, notes"
        )
    return str(formatter.getvalue()).rstrip("\n")


def _split(epilog: str) -> tuple[list[str], str]:
    """Returns the lines of the examples, and what stands around them."""
    notes, found = [], []
    for paragraph in epilog.split("\n\n"):
        if paragraph.startswith(EXAMPLES):
            found += paragraph.removeprefix(EXAMPLES).splitlines()
        elif paragraph:
            notes.append(paragraph)
    return [line.removeprefix("  ") for line in found], "\n\n".join(notes)


def _write_section(formatter: Any, title: str, lines: Iterable[str]) -> None:
    formatter.write_paragraph()
    formatter.write_heading(title)
    for line in lines:
        formatter.write(f"  {line}\n")


def _write_options(command: Any, ctx: Any, formatter: Any, *, is_whole: bool) -> int:
    """Writes arguments and options by theme. Returns how many options were left out."""
    sections: dict[str, list[tuple[str, str]]] = {}
    num_left, width = 0, formatter.width - NAMES_WIDTH - 6
    for param in command.get_params(ctx):
        is_option = param.param_type_name == "option"
        if is_option and not is_whole and (param.hidden or param.name == "help"):
            num_left += param.hidden
            continue
        title = (param.rich_help_panel or DEFAULT_TITLE) if is_option else "Arguments"
        record = _record(param, ctx, width, is_whole=is_whole)
        if record is not None:
            sections.setdefault(title, []).append(record)
    sections[DEFAULT_TITLE] = sections.pop(DEFAULT_TITLE, [])  # the last one, with --help
    if is_whole:
        sections[DEFAULT_TITLE].append((HELP_ALL, "Show all options, whole texts and notes."))
    for title, rows in sections.items():
        if not rows:
            continue
        if is_whole:
            formatter.write_paragraph()
        formatter.write_heading(title)
        formatter.indent()
        # All sections have one column of texts, and a long name has a line of its own.
        padded = [(f"{names:<{NAMES_WIDTH}}", text) for names, text in rows]
        formatter.write_dl(padded, col_max=NAMES_WIDTH + 2)
        formatter.dedent()
    return num_left


def _record(param: Any, ctx: Any, width: int, *, is_whole: bool) -> tuple[str, str] | None:
    """Returns the names and the text of a parameter. Unless `is_whole` this is its first sentence,
    where possible on a line of `width`, with its default if there is space."""
    shown = copy.copy(param)
    shown.hidden = False
    if is_whole or not shown.help:
        return shown.get_help_record(ctx)  # type: ignore[no-any-return]
    written = WRITTEN_DEFAULT.search(shown.help)
    first = FIRST_SENTENCE.match(shown.help)
    shown.help = shown.help if first is None else first[1]
    names, whole = shown.get_help_record(ctx)
    text, note = shown.help, ""
    if param.param_type_name == "option" and param.required:
        note = "  [required]"
    elif param.param_type_name == "option" and not param.is_flag:
        default = WRITTEN_DEFAULT.search(whole) or written
        note = "" if default is None else f"  [{default[1].partition(';')[0]}]"
    text = _shortened(text, width)
    return names, text + note if len(text + note) <= width else text


def _shortened(text: str, width: int) -> str:
    """Returns a sentence that is longer than a line without its explanations or examples. One that
    has none stays and goes on in the next line."""
    if len(text) <= width:
        return text
    found = EXPLANATION.search(text, MIN_SENTENCE)
    return text if found is None else text[: found.start()]
