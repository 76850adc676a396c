"""Signatures that show the options of a call, for completion in notebooks and for help()."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature, signature
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)
Function = TypeVar("Function", bound=Callable[..., object])


class Option(Parameter):
    """A parameter that stands for one key of `**options`."""

    __slots__ = ()


class BriefSignature(Signature):
    """A signature whose text has `**options` in place of each one, so that help() begins with what
    a class is for."""

    __slots__ = ()

    def format(self, **options: Any) -> str:
        """Returns the text in one line. options: of Python 3.13, for long ones; not used."""
        own = [each for each in self.parameters.values() if not isinstance(each, Option)]
        brief = [*own, Parameter("options", Parameter.VAR_KEYWORD)]
        return str(Signature(brief, return_annotation=self.return_annotation))

    def __str__(self) -> str:
        return self.format()


class _Unsaid:
    """The default of an option whose TypedDict says none."""

    def __repr__(self) -> str:
        return "..."


def options_of(source: type) -> list[Option]:
    """Returns the options that `source` has: a class of params, or a TypedDict."""
    fields = getattr(source, "model_fields", None)  # pydantic's
    defaults: dict[str, object]
    if fields is None:
        defaults = dict.fromkeys(source.__annotations__, _Unsaid())
    else:
        defaults = {
            own.alias or name: Parameter.empty if own.is_required() else own.get_default()
            for name, own in fields.items()
        }
    return [Option(name, Option.KEYWORD_ONLY, default=own) for name, own in defaults.items()]


def brief(cls: Class) -> Class:
    """Decorates a class that callers read and do not make: help() begins with its sentence."""
    fields = signature(cls).parameters.values()
    options = [Option(own.name, Option.KEYWORD_ONLY, default=own.default) for own in fields]
    cls.__signature__ = BriefSignature(options)  # type: ignore[attr-defined]
    return cls


def takes(source: type) -> Callable[[Function], Function]:
    """Decorates a function whose `**options` are those of `source`."""

    def with_signature(function: Function) -> Function:
        own = signature(function)
        fixed = [each for each in own.parameters.values() if each.kind != Parameter.VAR_KEYWORD]
        more = [each for each in options_of(source) if each.name not in own.parameters]
        found = BriefSignature([*fixed, *more], return_annotation=own.return_annotation)
        function.__signature__ = found  # type: ignore[attr-defined]
        return function

    return with_signature
