"""Groups of options, and commands that have an option for each field of a group."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from mmdeploy_llm.values.options.engine_flags import EngineFlags
from mmdeploy_llm.values.options.flags import Flag

Given = Mapping[str, Any]
SIMPLE = frozenset({bool, int, float, str})


class Rows:
    """Metadata of a parameter that stands for several options: it holds their values by name.

    source: the TypedDict whose keys have Flags. names: of the keys; none: all. title: see Group.
    The values of EngineFlags are those that are not None, with the program's defaults; of others
    what is given, so that the library has the defaults.
    """

    __slots__ = ("names", "source", "title")

    def __init__(self, source: type, *names: str, title: str = "") -> None:
        self.source, self.names, self.title = source, names, title

    @property
    def of_engine(self) -> bool:
        """Whether the rows are options of LLM, and not of its calls."""
        return self.source is EngineFlags

    @property
    def params(self) -> Iterator[tuple[str, inspect.Parameter]]:
        """Yields the names of the rows with their options."""
        own = _params_of(self.source)
        for name in self.names or own:
            yield name, own[name]


@dataclass(frozen=True, slots=True)
class Shown:
    """Metadata of an option with this default, which its parameter has only where it is given:
    else that is None."""

    default: Any


class Group:
    """The base of groups. Each method returns what the group's options set, and those of the groups
    in it, and nothing else.

    title: the theme under which --help lists the options; groups may share one.
    """

    __slots__ = ()
    title: ClassVar[str] = ""

    def to_settings(self) -> dict[str, Any]:
        """Returns fields of BatchSettings. Raises ConfigError for options that contradict."""
        return self._merged("to_settings")

    def to_batch(self) -> dict[str, Any]:
        """Returns options of LLM.run_batch. Raises ConfigError for options that contradict."""
        return self._merged("to_batch")

    def to_engine(self) -> dict[str, Any]:
        """Returns options of LLM(); those that are None are left out."""
        return self._merged("to_engine")

    def to_sampling(self) -> dict[str, Any]:
        """Returns parameters of SamplingParams; those that are None are left out."""
        return self._merged("to_sampling")

    def _merged(self, method: str) -> dict[str, Any]:
        own: Any = self
        hints, merged = _hints(own.__class__), dict[str, Any]()
        for field in fields(own):
            value, rows = getattr(self, field.name), _note(hints[field.name], Rows)
            more: Given = {}
            if isinstance(value, Group):
                more = getattr(value, method)()
            elif rows is not None and method == ("to_engine" if rows.of_engine else "to_batch"):
                more = value
            assert not merged.keys() & more.keys(), f"two groups set {merged.keys() & more.keys()}"
            merged |= more
        return merged


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command an option for each field of those parameters that are groups, and for each
    field of the groups in them."""
    own = inspect.signature(command, eval_str=True).parameters
    context = next((name for name, each in own.items() if each.annotation is typer.Context), None)

    def run(**given: Any) -> None:
        ctx = None if context is None else given[context]
        names = {name for name in given if ctx is None or is_given(ctx, name)}
        command(**{name: _taken(name, each.annotation, given, names) for name, each in own.items()})

    flat = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for param in own.values()
        for each in _flat(param)
    ]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    setattr(run, "__signature__", inspect.Signature(flat))  # noqa: B010  (mypy knows none such)
    return run


def is_given(ctx: typer.Context, name: str) -> bool:
    """Whether an option is given: on the command line or in a job, if only with its default."""
    return _source(ctx, name) == "COMMANDLINE"


def is_named(ctx: typer.Context, name: str) -> bool:
    """Whether an option is given, or has its value from an environment variable."""
    return _source(ctx, name) in ("COMMANDLINE", "ENVIRONMENT")


def _source(ctx: typer.Context, name: str) -> str:
    source = ctx.get_parameter_source(name)
    return "" if source is None else source.name


@cache
def _hints(group: Any) -> Mapping[str, Any]:
    return get_type_hints(group, include_extras=True)


def _note(annotation: Any, kind: type) -> Any:
    """Returns the metadata of a kind, None without."""
    notes = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return next((each for each in notes if isinstance(each, kind)), None)


def _flat(param: inspect.Parameter) -> Sequence[inspect.Parameter]:
    """Returns the options of a parameter: itself, those of its rows, or those of its group."""
    own: Any = param.annotation
    if is_dataclass(param.annotation):
        return _options_of(own)
    if (rows := _note(param.annotation, Rows)) is not None:
        return [_titled(each, rows.title) for _, each in rows.params]
    shown = _note(param.annotation, Shown)
    return [param if shown is None else param.replace(default=shown.default)]


@cache
def _options_of(group: Any) -> Sequence[inspect.Parameter]:
    """Returns the options of a group, under its title."""
    own = inspect.signature(group, eval_str=True).parameters.values()
    return [_titled(flat, group.title) for each in own for flat in _flat(each)]


def _titled(param: inspect.Parameter, title: str) -> inspect.Parameter:
    """Returns an option, listed under a title unless it has one."""
    if not title or get_origin(param.annotation) is not Annotated:
        return param
    value, *notes = get_args(param.annotation)
    for index, note in enumerate(notes):
        if isinstance(note, OptionInfo) and note.rich_help_panel is None:
            notes[index] = copy.copy(note)
            notes[index].rich_help_panel = title
    return param.replace(annotation=Annotated[value, *notes])


def _taken(name: str, annotation: Any, given: dict[str, Any], names: set[str]) -> Any:
    """Takes the value of a parameter from the values of all options. names: of those given."""
    if is_dataclass(annotation):
        group: Any = annotation
        return group(**{each: _taken(each, own, given, names) for each, own in _fields(group)})
    if (rows := _note(annotation, Rows)) is not None:
        values = {each: (own.name, given.pop(own.name)) for each, own in rows.params}
        return {
            each: value
            for each, (own, value) in values.items()
            if value is not None and (rows.of_engine or own in names)
        }
    value = given.pop(name)
    return None if _note(annotation, Shown) is not None and name not in names else value


def _fields(group: Any) -> Iterator[tuple[str, Any]]:
    hints = _hints(group)
    return ((field.name, hints[field.name]) for field in fields(group))


@cache
def _params_of(source: type) -> Mapping[str, inspect.Parameter]:
    """Returns the options of those keys that have a Flag, by the keys."""
    flags = ((name, own, _note(own, Flag)) for name, own in _hints(source).items())
    return {name: _param(name, get_args(own)[0], flag) for name, own, flag in flags if flag}


def _param(name: str, kind: Any, flag: Flag) -> inspect.Parameter:
    """Returns the option of a key. kind: the type of its values in Python."""
    types = {each for each in (get_args(kind) or (kind,)) if each is not type(None)}
    own = flag.type or (types.pop() if len(types) == 1 and types <= SIMPLE else str)
    default = False if own is bool and flag.default is None else flag.default
    names = flag.names or ((f"--{name.replace('_', '-')}",) if own is bool else ())
    is_other = len(names) == 1 and "/" not in names[0]
    option = typer.Option(
        *names,
        help=flag.help,
        metavar=flag.metavar,
        hidden=flag.is_rare,
        min=flag.min,
        max=flag.max,
        exists=flag.is_file,
        dir_okay=not flag.is_file,
    )
    return inspect.Parameter(
        names[0].removeprefix("--").replace("-", "_") if is_other else name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[own | None if default is None else own, option],
    )
