"""FrozenParams: the base of all options that a caller passes in. pydantic checks them; the errors
are this package's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.values.text.display import shown
from mmdeploy_llm.values.text.signatures import BriefSignature, options_of
from mmdeploy_llm.values.text.spelling import meant

from .foreign import advice, foreign_options, that_ask

MAX_INT = 2**63 - 1  # the largest number in an array
MAX_DEPTH = 16  # of lists and dicts in an option


@dataclass(frozen=True, slots=True)
class Accepts:
    """Metadata of a field whose validator reads more types than the field holds. types: what a
    caller may give, as an annotation is written, for the generated TypedDicts."""

    types: str


class FrozenParams(BaseModel):
    """Base class of all options that a caller passes in. Instances are frozen; `replace` makes a
    changed copy.

    None for an option that does not accept it leaves its default. Raises ConfigError for a value
    out of range, and for an unknown name with what was meant. Unknown ones of other engines that
    ask for nothing are left out.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        cls.__signature__ = BriefSignature(options_of(cls))

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            left = that_ask(type(self).__name__, names_of(type(self)), values)
            if len(left) == len(values):
                raise ConfigError(describe(type(self), error)) from None
            FrozenParams.__init__(self, **left)

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with some options changed, checked like a new object."""
        fields = type(self).model_fields
        given = {fields[name].alias or name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**{**given, **changes})

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        kind = type(self).__name__
        raise ConfigError(
            f"{kind} cannot be changed, because other prompts may use the same object; its method "
            f"replace({name}={shown(value)}) returns a changed copy"
        )

    def __delattr__(self, name: str) -> NoReturn:
        raise ConfigError(
            f"{type(self).__name__} cannot be changed; replace({name}=None) returns a copy with "
            "the default"
        )

    @model_validator(mode="before")
    @classmethod
    def _read(cls, values: Any) -> Any:
        """Drops None given for an option that does not accept it, as FastDeploy's examples do, so
        that the default applies. Raises ValueError for a dict in the place of other params with
        keys that are no text: pydantic would pass them to `__init__`."""
        left = dict(values) if isinstance(values, dict) else {}
        for name, field in cls.model_fields.items():
            takes_none = type(None) in get_args(field.annotation) or field.is_required()
            value = left.get(name)
            if value is None and not takes_none:
                left.pop(name, None)
            if isinstance(value, dict) and _is_params(field.annotation):
                wrong = next((key for key in value if not isinstance(key, str)), None)
                if wrong is not None:
                    raise ValueError(f"{name} has option {shown(wrong)}; names are texts")
        return left if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _integers_fit(self) -> Self:
        """Raises ValueError for an integer that no array can hold."""
        for name in self.model_fields_set:
            value = getattr(self, name)
            if isinstance(value, int) and abs(value) > MAX_INT:
                raise ValueError(f"{name} must be at most 2**63 - 1, got {shown(value)}")
        return self


def _is_params(annotation: Any) -> bool:
    kinds = (annotation, *get_args(annotation))
    return any(isinstance(kind, type) and issubclass(kind, FrozenParams) for kind in kinds)


def describe(model: type[BaseModel], error: ValidationError) -> str:
    """Returns one line for each problem: the field, what is allowed and what was found."""
    return "\n".join(_describe_one(model, problem) for problem in error.errors())


def _describe_one(model: type[BaseModel], problem: ErrorDetails) -> str:
    parts = [str(part) for part in problem["loc"]]
    name = ".".join(part for part in parts if not part.startswith("function-"))
    if problem["type"] == "extra_forbidden":
        return f"{model.__name__} has no option {name!r}; {_hint(model, name)}"
    message = problem["msg"].removeprefix("Value error, ")
    if not name:
        return f"{model.__name__}: {message}"
    if problem["input"] is None and len(problem["loc"]) > 1:
        message = "None is not allowed inside a list or dict; leave it out"
    return f"{model.__name__}.{name}: {message}, got {shown(problem['input'])}"


def _hint(model: type[BaseModel], name: str) -> str:
    """Returns what to write instead of an option that does not exist."""
    if (here := advice(model.__name__).get(name)) is not None:
        return here
    for other in _all_params(FrozenParams):
        owner = other.__name__
        if foreign_options(owner) and owner != model.__name__ and name in names_of(other):
            return f"it is an option of {'LLM' if owner == 'EngineConfig' else owner}"
    near = meant(name, names_of(model))
    return f"did you mean {near!r}?" if near else f"known: {', '.join(sorted(names_of(model)))}"


def names_of(model: type[BaseModel]) -> list[str]:
    """Returns the names of options as a caller writes them."""
    return [field.alias or name for name, field in model.model_fields.items()]


def _all_params(model: type[FrozenParams]) -> Iterator[type[FrozenParams]]:
    for own in model.__subclasses__():
        yield own
        yield from _all_params(own)


def check_plain(value: Any, name: str, depth: int = MAX_DEPTH) -> None:
    """Raises ValueError unless `value` consists of numbers, texts, lists, tuples and dicts, which
    can be sent to the process that computes."""
    if value is None or type(value) in (bool, float, str):
        return
    if type(value) is int and abs(value) <= MAX_INT:
        return
    if depth == 0 or type(value) not in (list, tuple, dict):
        raise ValueError(
            f"{name} must consist of numbers, texts, lists and dicts, at most {MAX_DEPTH} levels "
            f"deep, with integers of at most 63 bits; got {shown(value)}"
        )
    for key in value:
        check_plain(key, name, depth - 1)
    for item in value.values() if isinstance(value, dict) else ():
        check_plain(item, name, depth - 1)
