"""Groups of options, and commands that have an option for each field of a group."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, ClassVar, get_args, get_origin

from typer.models import OptionInfo


class Group:
    """The base of groups. Each method returns what the group's options set, and nothing else.

    title: the theme under which --help lists the options; groups may share one.
    """

    __slots__ = ()
    title: ClassVar[str] = ""

    def to_settings(self) -> dict[str, Any]:
        """Returns fields of BatchSettings. Raises ConfigError for options that contradict."""
        return {}

    def to_engine(self) -> dict[str, Any]:
        """Returns options of LLM(); those that are None are left out."""
        return {}

    def to_sampling(self) -> dict[str, Any]:
        """Returns parameters of SamplingParams; those that are None are left out."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups(Group):
    """The base of groups of groups: returns what all of them set."""

    def to_settings(self) -> dict[str, Any]:
        """Returns the fields that the groups set."""
        return self._merged("to_settings")

    def to_engine(self) -> dict[str, Any]:
        """Returns the options that the groups set."""
        return self._merged("to_engine")

    def to_sampling(self) -> dict[str, Any]:
        """Returns the parameters that the groups set."""
        return self._merged("to_sampling")

    def _merged(self, method: str) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for field in fields(self):
            more = getattr(getattr(self, field.name), method)()
            assert not merged.keys() & more.keys(), f"two groups set {merged.keys() & more.keys()}"
            merged |= more
        return merged


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command an option for each field of those parameters that are groups, and for each
    field of the groups in them."""
    own = inspect.signature(command, eval_str=True).parameters

    def run(**given: Any) -> None:
        command(**{name: _taken(name, param.annotation, given) for name, param in own.items()})

    flat = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for param in own.values()
        for each in _flat(param)
    ]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    setattr(run, "__signature__", inspect.Signature(flat))  # noqa: B010  (mypy knows none such)
    return run


def _flat(param: inspect.Parameter) -> Iterator[inspect.Parameter]:
    """Yields the options of a parameter: itself, or those of its group under the group's title."""
    if not is_dataclass(param.annotation):
        yield param
        return
    group: Any = param.annotation
    for each in inspect.signature(group, eval_str=True).parameters.values():
        for flat in _flat(each):
            yield flat.replace(annotation=_titled(flat.annotation, group.title))


def _titled(annotation: Any, title: str) -> Any:
    """Returns the annotation of an option, listed under a title unless it has one."""
    if not title or get_origin(annotation) is not Annotated:
        return annotation
    value, *notes = get_args(annotation)
    for index, note in enumerate(notes):
        if isinstance(note, OptionInfo) and note.rich_help_panel is None:
            notes[index] = copy.copy(note)
            notes[index].rich_help_panel = title
    return Annotated[value, *notes]


def _taken(name: str, annotation: Any, given: dict[str, Any]) -> Any:
    """Takes the value of a parameter from the values of all options."""
    if not is_dataclass(annotation):
        return given.pop(name)
    group: Any = annotation
    parts = inspect.signature(group, eval_str=True).parameters
    return group(**{each: _taken(each, param.annotation, given) for each, param in parts.items()})
