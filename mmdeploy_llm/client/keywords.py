"""Keywords of other engines' calls: an error of a wrong one says what to write here, and one that
asks for nothing is left out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any, TypeVar

from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.params.foreign import advice, foreign_options
from mmdeploy_llm.values.text.spelling import meant

VECTOR_CALLS = ("classify", "embed", "embed_iter", "rerank", "score")
CALLS = ("chat", "generate", "generate_iter", "stream", "submit", *VECTOR_CALLS)
Cls = TypeVar("Cls", bound=type)

# Keywords of other engines that the calls take under another name.
ALSO: Mapping[str, str] = MappingProxyType({"lora_name": "adapter", "lora_request": "adapter"})


def explaining_keywords(cls: Cls) -> Cls:
    """Decorates a class whose calls say of keywords that they do not have what to write instead."""
    for name in CALLS:
        if callable(method := getattr(cls, name, None)):
            setattr(cls, name, _explaining(method))
    return cls


def _explaining(method: Callable[..., Any]) -> Callable[..., Any]:
    known = inspect.signature(method).parameters

    @wraps(method)
    def call(self: Any, *args: Any, **given: Any) -> Any:
        if not given.keys() <= known.keys():
            given = _known_ones(method.__name__, known, given)
        return method(self, *args, **given)

    return call


def _known_ones(
    method: str, known: Mapping[str, object], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the keywords that the method has. Raises TypeError for others that ask for
    something."""
    given = {**given}
    for name in (name for name in ALSO if name in given and ALSO[name] in known):
        value = given.pop(name)
        if value is not None and given.setdefault(ALSO[name], value) is not value:
            raise TypeError(f"{method}() got {name} and {ALSO[name]}; give one of them")
    for name, value in given.items():
        if name not in known and not _asks_for_nothing(name, value):
            hint = _advice(name, value, known)
            raise TypeError(f"{method}() has no argument {name!r}; {hint}")
    return {name: value for name, value in given.items() if name in known}


def _asks_for_nothing(name: str, value: Any) -> bool:
    if row := foreign_options("calls").get(name):
        return row.is_off(value)
    return value is None and name in (*SamplingParams.model_fields, *advice("SamplingParams"))


def _advice(name: str, value: Any, known: Mapping[str, object]) -> str:
    if here := advice("calls").get(name):
        return here
    if name in SamplingParams.model_fields:
        return f"use sampling_params=SamplingParams({name}={value!r:.40})"
    if here := advice("SamplingParams").get(name):
        return f"of options of one request, which are in SamplingParams: {here}"
    engine = advice("EngineConfig")
    if name in (*EngineConfig.model_fields, *engine):
        return f"it is an option of LLM: {engine.get(name, f'LLM({name}=...)')}"
    near = meant(name, known)
    return f"did you mean {near!r}?" if near else f"known: {', '.join(list(known)[1:])}"
