"""Describes transformers' config objects as plain values, and makes stand-ins of them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from mmdeploy_llm.layers.basic.scaled_rope import FREQUENCIES, STANDS_IN, all_frequencies
from mmdeploy_llm.layers.config_reader import DECLARED, declared_keys
from mmdeploy_llm.weights.cache import NotKeptError

from .stand_in import Own, Source, StandIn

MAX_NESTED = 4  # configs in configs
WARNING = ("torch_dtype", "use_return_dict")  # attributes that warn when they are read
TEXT = "get_text_config"


def describe_config(config: Any, depth: int = 0) -> dict[str, Any]:
    """Returns a config and those in it as plain values. Raises NotKeptError for a config whose
    class is not transformers' own."""
    kind = type(config)
    if not kind.__module__.startswith("transformers.") or depth > MAX_NESTED:
        raise NotKeptError(f"a config is a {kind.__module__}.{kind.__name__}")
    values: dict[str, Any] = {}
    nested: dict[str, Any] = {}
    others = []
    for name in _names(config):
        try:
            value = None if name in WARNING else getattr(config, name)
        except Exception:  # a property raises what it likes; asking again raises it again
            others.append(name)
            continue
        if _is_config(value) and value is not config:
            nested[name] = describe_config(value, depth + 1)
            continue
        try:
            values[name] = plain(value)
        except NotKeptError:
            others.append(name)
    for name in WARNING:
        values.pop(name, None)
    values.pop(FREQUENCIES, None)  # in a config.json it would mean nothing
    with suppress(Exception):  # transformers raises what it likes, and again for who needs them
        values[FREQUENCIES] = plain(all_frequencies(config))
    return {
        "class": [kind.__module__, kind.__name__, plain(kind.model_type)],
        "declared": sorted(declared_keys(config)),
        "text": _text_of(config, nested),
        "values": values,
        "nested": nested,
        "others": [*others, *WARNING],
    }


def _names(config: Any) -> list[str]:
    names = {*dir(config), *config.attribute_map}
    return sorted(name for name in names if not name.startswith("__"))


def _is_config(value: object) -> bool:
    from transformers import PreTrainedConfig

    return isinstance(value, PreTrainedConfig)


def _text_of(config: Any, nested: Mapping[str, Any]) -> str | None:
    """Returns which of the nested configs is that of the language model; "" for the config itself,
    None for another."""
    try:
        found = config.get_text_config()
    except Exception:  # what transformers raises for a config without one is raised again
        return None
    if found is config:
        return ""
    return next((name for name in nested if getattr(config, name) is found), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level(Own):
    """A config at a path below the whole one."""

    source: Source
    path: tuple[str, ...]
    name: str
    text: str | None
    values: Mapping[str, Any]
    others: frozenset[str]

    def real(self) -> Any:
        return reduce(getattr, self.path, self.source.real())

    def kept(self, owner: Any, name: str) -> Any:
        if name in self.values:
            return self.values[name]
        if name == TEXT and self.text is not None:
            found = getattr(owner, self.text) if self.text else owner
            return lambda *args, **kwargs: (
                getattr(self.real(), TEXT)(*args, **kwargs) if args or kwargs else found
            )
        if name in self.others or name.startswith("__"):
            return NotImplemented
        raise AttributeError(f"{self.name!r} object has no attribute {name!r}")


def config_stand_in(values: Mapping[str, Any], source: Source, path: tuple[str, ...] = ()) -> Any:
    """Makes the stand-in of a config from what `describe_config` has returned. source: loads the
    whole config. path: of this one in it."""
    module, name, model_type = values["class"]
    nested = {
        key: config_stand_in(each, source, (*path, key)) for key, each in values["nested"].items()
    }
    own = _Level(
        source=source,
        path=path,
        name=name,
        text=values["text"],
        values={**{key: unplain(each) for key, each in values["values"].items()}, **nested},
        others=frozenset(values["others"]),
    )
    # What is asked of the class of a config, without an object, has the answers of transformers'.
    told = {"__module__": module, "model_type": model_type, DECLARED: tuple(values["declared"])}
    told[STANDS_IN] = True
    return type(name, (StandIn,), {"__slots__": (), **told})(own)


MAX_DEPTH = 16


def plain(value: Any, depth: int = 0) -> Any:
    """Returns a value as JSON holds it. Raises NotKeptError for one that would not be the same
    after reading."""
    kind = type(value)
    if depth > MAX_DEPTH:
        raise NotKeptError("a value is nested too deep")
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [plain(each, depth + 1) for each in value]
    if kind is tuple:
        return {"tuple": [plain(each, depth + 1) for each in value]}
    if kind is dict:
        pairs = value.items()
        return {"dict": [[plain(k, depth + 1), plain(v, depth + 1)] for k, v in pairs]}
    if kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    raise NotKeptError(f"a value is a {kind.__name__}")


def unplain(value: Any) -> Any:
    """Returns the value that `plain` was given."""
    if isinstance(value, list):
        return [unplain(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, own),) = value.items()
    if kind == "tuple":
        return tuple(unplain(each) for each in own)
    if kind == "dtype":
        return getattr(torch, own)
    assert kind == "dict", kind
    return {unplain(key): unplain(each) for key, each in own}
