"""Options that a processor declares by their defaults: resolved for an engine, and for one item."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from mmdeploy_llm.errors import CheckpointError, ConfigError, MediaError
from mmdeploy_llm.messages import MEDIA_KINDS

FROM_LLM = "give it for all of them, in LLM(mm_processor_kwargs=...)"


def file_settings(
    defaults: Mapping[str, Any], file: Mapping[str, Any], names: Collection[str]
) -> dict[str, Any]:
    """Returns the defaults, those of `names` overridden by the checkpoint's file. Raises
    CheckpointError for a wrong value."""
    found = {name: file[name] for name in names if file.get(name) is not None}
    checked = {
        name: _checked(name, value, defaults[name], _wrong_file) for name, value in found.items()
    }
    return {**defaults, **checked}


def engine_settings(
    kind: str, defaults: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the defaults, overridden by mm_processor_kwargs, whose names may begin with the kind.
    A default bound, such as min_tiles, gives way to a given one, such as max_tiles.

    Names of other kinds are left to their processors. Raises ConfigError for a name or value of
    this kind that is wrong.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        own = name if name in defaults else name.removeprefix(f"{kind}_")
        if own in defaults:
            found[own] = _checked(own, value, defaults[own], _wrong_option)
        elif _is_of(kind, name):
            raise ConfigError(f"mm_processor_kwargs has no {kind} option {_hint(name, defaults)}")
    return _giving_way({**defaults, **found}, found)


def _giving_way(settings: dict[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Returns settings in which a bound that was not given is equal to the given one that it
    contradicts."""
    for low in [name for name in settings if name.startswith("min_")]:
        high = "max_" + low.removeprefix("min_")
        if high in settings and settings[low] > settings[high]:
            if low not in given and high in given:
                settings[low] = settings[high]
            elif high not in given and low in given:
                settings[high] = settings[low]
    return settings


def item_settings(
    kind: str,
    settings: Mapping[str, Any],
    given: Mapping[str, Any],
    names: Collection[str],
    bounds: Collection[str],
) -> Mapping[str, Any]:
    """Returns the engine's settings, overridden by the options of one item.

    names: options that an item may set. bounds: those that may not be above the engine's, which has
    measured the memory for these. Raises MediaError for all others, and for wrong values.
    """
    if not given:
        return settings
    found = dict(settings)
    if not names:
        raise MediaError(
            f"{_a(kind)} of this model takes no options of its own, found "
            f"{', '.join(map(repr, given))}; give them for all {kind}s in "
            "LLM(mm_processor_kwargs=...)"
        )
    for name, value in given.items():
        if name not in names:
            if name in settings:
                raise MediaError(f"one prompt or {kind} cannot set {name}; {FROM_LLM}")
            raise MediaError(f"{_a(kind)} of this model has no option {_hint(name, names)}")
        found[name] = _checked(name, value, settings[name], _wrong_value)
        if name in bounds and found[name] > settings[name]:
            raise MediaError(
                f"{name} = {value} is above the engine's {settings[name]}; raise it in "
                "LLM(mm_processor_kwargs=...)"
            )
    limits = [name for name in settings if name.startswith("max_")]  # those of the engine stay
    return _giving_way(found, {*given, *limits})


def _is_of(kind: str, name: str) -> bool:
    """Returns whether an option of all processors can only be one of this kind: those of images may
    have no prefix."""
    others = tuple(f"{other}_" for other in MEDIA_KINDS if other != kind)
    return name.startswith(f"{kind}_") or (kind == "image" and not name.startswith(others))


def _hint(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(str(name), list(known), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known)) or 'none'}"
    return f"{name!r}; {hint}"


def _a(kind: str) -> str:
    return f"{'an' if kind[:1] in 'aeiou' else 'a'} {kind}"


def _wrong_option(message: str) -> ConfigError:
    return ConfigError(f"mm_processor_kwargs: {message}")


def _wrong_file(message: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint's preprocessor: {message}")


def _wrong_value(message: str) -> MediaError:
    return MediaError(message)


def _checked(name: str, value: Any, default: Any, error: Callable[[str], Exception]) -> Any:
    """Returns the value if it is one of the default's type, a list as a tuple."""
    holds, text = _rule(default)
    if not holds(value):
        raise error(f"{name} must be {text}, got {value!r:.80}")
    return tuple(value) if isinstance(default, tuple) else value


def _rule(default: Any) -> tuple[Callable[[Any], bool], str]:
    """Returns what a value must be where this is the default."""
    match default:
        case bool():
            return lambda value: isinstance(value, bool), "True or False"
        case int():
            least = min(default, 1)
            return lambda value: _is_int(value) and value >= least, f"a whole number from {least}"
        case float():
            return _is_number, "a number"
        case str():
            return lambda value: isinstance(value, str), "a text"
        case tuple():
            size = len(default)
            return (
                lambda value: (
                    isinstance(value, (list, tuple))
                    and len(value) == size
                    and all(map(_is_number, value))
                ),
                f"{size} numbers",
            )
    raise TypeError(f"the default {default!r} is no bool, int, float, text or tuple of numbers")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_real and math.isfinite(value)
