"""The rules that fields of specs keep, each as a text and as a check."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from types import MappingProxyType

from mmdeploy_llm.hooks.objects.attention import AttentionBackendSpec
from mmdeploy_llm.hooks.objects.chat_parts import (
    CHAT_PART_TYPE,
    OWN_TYPES,
    ChatPartSpec,
    are_keys,
)
from mmdeploy_llm.hooks.objects.logits import LogitsProcessorSpec
from mmdeploy_llm.hooks.objects.reading import ReadingPreset
from mmdeploy_llm.hooks.objects.store import CorpusFormatSpec, OutputSinkSpec
from mmdeploy_llm.hooks.objects.weights import WeightFormatSpec
from mmdeploy_llm.messages import MEDIA_KIND
from mmdeploy_llm.values.first_bytes import HEAD
from mmdeploy_llm.values.options.budget import is_budget

from .contracts import MediaProcessorSpec, ModelSpec, ReasoningParserSpec, ToolParserSpec
from .records import Spec

TP_KINDS = (
    *("colwise", "heads", "rowwise", "experts", "vocab", "whole"),
    *("rowwise-partial", "experts-partial", "sum"),
)
DTYPES = ("bfloat16", "float16", "float32")
CACHE_DTYPES = (*DTYPES, "int8", "int4", "float8_e4m3fn")
ATTENTION_FEATURES = tuple(own.name for own in fields(AttentionBackendSpec) if own.type == "bool")

_ANY = re.compile(r"(?s).*")
_SUFFIX = re.compile(r"\.[^\s./\\A-Z]+")
_SUFFIXES = re.compile(rf"({_SUFFIX.pattern})+")
_PART_TYPE = re.compile(r"(?!text$)[a-z][a-z0-9_]*")
_FACTORY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_name(value: object) -> bool:
    return isinstance(value, str) and value.strip() != ""


def _is_names(value: object, form: re.Pattern[str] = _ANY) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(name, str) and is_name(name) and form.fullmatch(name) for name in value
    )


def _is_factory(value: object) -> bool:
    return isinstance(value, str) and _FACTORY.fullmatch(value) is not None


def _is_priority(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_begin(value: object) -> bool:
    """Whether it is an entry of first_bytes: one byte alone would begin files of every kind."""
    offset, begin = value if isinstance(value, tuple) and len(value) == 2 else (0, value)
    return (
        isinstance(begin, bytes)
        and _is_priority(offset)
        and len(begin) >= 2
        and 0 <= offset <= HEAD - len(begin)
    )


def _is_tp_plan(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        is_name(pattern) and kind in TP_KINDS for pattern, kind in value.items()
    )


def _is_count(value: object) -> bool:
    return _is_priority(value) and isinstance(value, int) and value > 0


def _is_count_or_none(value: object) -> bool:
    return value is None or _is_count(value)


def _is_tasks(value: object) -> bool:
    if not isinstance(value, Mapping) or not value:
        return False
    return all(is_name(name) and isinstance(text, str) for name, text in value.items())


def _are_dtypes(value: object) -> bool:
    return isinstance(value, tuple) and value != () and all(x in DTYPES for x in value)


def _are_cache_dtypes(value: object) -> bool:
    return isinstance(value, tuple) and all(x in CACHE_DTYPES for x in value)


def _is_capability(value: object) -> bool:
    return value is None or (
        isinstance(value, tuple) and len(value) == 2 and all(map(_is_priority, value))
    )


Rule = tuple[str, Callable[[object], bool]]  # what is allowed, as text and as a check

_COMMON: Mapping[str, Rule] = MappingProxyType(
    {
        "name": ("a text that is not empty", is_name),
        "factory": ('"module:Attribute"', _is_factory),
        "priority": ("an int", _is_priority),
    }
)
_KEYS: Rule = (
    "a mapping of names, not 'type', to str, int, float, bool, list, dict or object",
    are_keys,
)
_COUNT: Rule = ("a whole number above 0", _is_count)
_SOME_SUFFIXES: Rule = (
    "a tuple of at least one suffix in small letters, such as '.warc.gz'",
    lambda value: _is_names(value, _SUFFIXES) and value != (),
)
_SOME_NAMES: Rule = (
    "a tuple of at least one text",
    lambda value: _is_names(value) and value != (),
)
_NAMES: Rule = ("a tuple of texts", _is_names)
_BEGINS: Rule = (
    f"a tuple of 2 bytes or more, or of (offset, bytes), within the first {HEAD}",
    lambda value: isinstance(value, tuple) and all(map(_is_begin, value)),
)
_CAPABILITY: Rule = ("a tuple such as (9, 0) or None", _is_capability)
_NAME_OR_NONE: Rule = (
    "a parser's name or None",
    lambda value: value is None or is_name(value),
)
_KIND: Rule = (
    "a lower-case word such as 'image', 'video' or one of your own (not 'text')",
    lambda value: isinstance(value, str) and MEDIA_KIND.fullmatch(value) is not None,
)

RULES: Mapping[type[Spec], Mapping[str, Rule]] = MappingProxyType(
    {
        ModelSpec: {
            **_COMMON,
            "architectures": _SOME_NAMES,
            "media": (
                "a tuple of lower-case words such as 'image' and 'video' (not 'text')",
                lambda value: isinstance(value, tuple) and all(map(_KIND[1], value)),
            ),
            "reasoning": _NAME_OR_NONE,
            "tools": _NAME_OR_NONE,
            "atomic_media": ("a bool", lambda value: isinstance(value, bool)),
            "refuses": (
                '"module:function" or None',
                lambda value: value is None or _is_factory(value),
            ),
            "gguf": ('"module:TABLE" or None', lambda value: value is None or _is_factory(value)),
            "tiny": (
                '"module:FAMILY" or None',
                lambda value: value is None or _is_factory(value),
            ),
            "tp_plan": (f"a mapping of module names to {TP_KINDS}", _is_tp_plan),
        },
        ReasoningParserSpec: {**_COMMON, "aliases": _NAMES},
        ToolParserSpec: {**_COMMON, "aliases": _NAMES},
        LogitsProcessorSpec: {**_COMMON, "aliases": _NAMES, "arguments": _NAMES},
        ReadingPreset: {
            "name": _COMMON["name"],
            "priority": _COMMON["priority"],
            "aliases": _NAMES,
            "architectures": _SOME_NAMES,
            "marks": _NAMES,
            "tasks": ("a mapping of one task or more to prompts", _is_tasks),
            "system": ("a text or None", lambda value: value is None or isinstance(value, str)),
            "image_tokens": (
                "a number, 'auto', 'full' or None",
                lambda value: value is None or is_budget(value),
            ),
            "dpi": _COUNT,
            "longest_side": ("None or a whole number above 0", _is_count_or_none),
            "max_tokens": _COUNT,
            "sampling": ("a mapping", lambda value: isinstance(value, Mapping)),
            "convert": (
                '"module:function" or None',
                lambda value: value is None or _is_factory(value),
            ),
            "source": ("a text", lambda value: isinstance(value, str)),
        },
        CorpusFormatSpec: {
            "name": _COMMON["name"],
            "priority": _COMMON["priority"],
            "suffixes": _SOME_SUFFIXES,
            "reader": ('"module:function"', _is_factory),
            "first_bytes": _BEGINS,
        },
        OutputSinkSpec: {**_COMMON, "suffixes": _SOME_SUFFIXES},
        AttentionBackendSpec: {
            **_COMMON,
            "aliases": _NAMES,
            "devices": _SOME_NAMES,
            "dtypes": ("a tuple of 'bfloat16', 'float16', 'float32'", _are_dtypes),
            "cache_dtypes": (f"a tuple of some of {CACHE_DTYPES}", _are_cache_dtypes),
            "max_head_dim": ("None or a whole number above 0", _is_count_or_none),
            "head_multiple": _COUNT,
            "block_multiple": _COUNT,
            "block_size": _COUNT,
            "min_capability": _CAPABILITY,
            "below_capability": _CAPABILITY,
            **dict.fromkeys(ATTENTION_FEATURES, ("a bool", lambda value: isinstance(value, bool))),
            "available": (
                '"module:function" or None',
                lambda value: value is None or _is_factory(value),
            ),
        },
        WeightFormatSpec: {
            **_COMMON,
            "aliases": _NAMES,
            "suffixes": _SOME_NAMES,
            "ignored": _NAMES,
            "quantise": (
                '"module:function" or None',
                lambda value: value is None or _is_factory(value),
            ),
        },
        ChatPartSpec: {
            **_COMMON,
            "types": (
                f"a tuple of at least one word in small letters, none of {OWN_TYPES}",
                lambda value: _is_names(value, CHAT_PART_TYPE) and value != (),
            ),
            "keys": _KEYS,
            "optional": _KEYS,
            "models": _SOME_NAMES,
            "files": _NAMES,
            "late": ("a bool", lambda value: isinstance(value, bool)),
        },
        MediaProcessorSpec: {
            **_COMMON,
            "kind": _KIND,
            "models": _SOME_NAMES,
            "suffixes": (
                "a tuple of suffixes in small letters, such as '.wav'",
                lambda value: _is_names(value, _SUFFIXES),
            ),
            "columns": _NAMES,
            "first_bytes": _BEGINS,
            "part_types": (
                "a tuple of words in small letters such as 'input_audio' (not 'text')",
                lambda value: _is_names(value, _PART_TYPE),
            ),
            "part_text": (
                "a text that is not empty or None",
                lambda value: value is None or (isinstance(value, str) and value != ""),
            ),
            "yields": (f"{_KIND[0]} or None", lambda value: value is None or _KIND[1](value)),
        },
    }
)
