"""The tables of options.md and decoder_options.md, made of the fields' own descriptions, those of
option_names.md, and the fields of a record in captioning.md. The Chinese page says these in its own
words, so that their table has other marks."""

from __future__ import annotations

import inspect
import re
import types
from typing import Any, Literal, Union, get_args, get_origin

import decoder_table

from mmdeploy_llm.data.records.record import FIELDS
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.params import (
    EarlyStopParams,
    GuidedDecodingParams,
    NoRepeatNGramParams,
    SamplingParams,
)
from mmdeploy_llm.values.params.foreign import advice

TABLE = re.compile(r"(<!-- table: ([^\n]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
OF_RECORDS = re.compile(r"(<!-- fields of a record -->\n).*?(<!-- end of fields -->)", re.DOTALL)
BOUNDS = {"ge": "from {}", "gt": "above {}", "le": "to {}", "max_length": "{} at most"}
PAGES = ("options.md", "option_names.md", "decoder_options.md", "captioning.md")
DECODER = "DecoderConfig"
ELSEWHERE = "counterparts of "  # in the title of a table
PARAMS = {
    cls.__name__: cls
    for cls in (SamplingParams, GuidedDecodingParams, EarlyStopParams, NoRepeatNGramParams)
}
NAMES = {"str": "text", "Path": "text", "Mapping": "dict", "NoneType": "None", "tuple": "list"}


def themes() -> dict[str, list[str]]:
    """Returns the options of an engine by their heading in options.md: the title of their class."""
    found: dict[str, list[str]] = {}
    for cls in reversed(EngineConfig.__mro__):
        if (title := vars(cls).get("title")) is not None:
            own = inspect.get_annotations(cls)
            found.setdefault(title, []).extend(
                name for name in own if name in EngineConfig.model_fields
            )
    return found


def fill(markdown: str) -> str:
    """Writes the tables between their markers."""
    filled = TABLE.sub(lambda match: f"{match[1]}\n{table(match[2])}\n{match[3]}", markdown)
    return OF_RECORDS.sub(lambda match: f"{match[1]}\n{fields()}\n{match[2]}", filled)


def table(title: str) -> str:
    """Returns the table of a group of EngineConfig's fields, of all fields of a class, or of the
    options that other engines have."""
    if title == DECODER:
        return decoder_table.table()
    if title.startswith(ELSEWHERE):
        return counterparts(title.removeprefix(ELSEWHERE))
    if title in PARAMS:
        fields = dict(PARAMS[title].model_fields)
    else:
        fields = {name: EngineConfig.model_fields[name] for name in themes()[title]}
    rows = ["| name | default | type | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        cells = (
            f"`{field.alias or name}`",
            default(name, field),
            f"{kind(field.annotation)}{bounds(field)}",
            field.description,
        )
        rows.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def fields() -> str:
    """Returns the table of the fields of a record."""
    rows = ["| field | meaning |", "|---|---|"]
    for name, own in FIELDS.items():
        meaning = f"{own.says}; see {own.page}" if own.page else own.says
        rows.append(f"| `{name}` | {meaning.replace('|', chr(92) + '|')} |")
    return "\n".join(rows) + "\n"


def counterparts(owner: str) -> str:
    """Returns the table of options that other engines have."""
    rows = [f"| `{name}` | {here} |" for name, here in sorted(advice(owner).items())]
    return "\n".join(["| there | here |", "|---|---|", *rows]) + "\n"


def default(name: str, field: Any) -> str:
    """Returns the default as it is written in Python, large numbers of bytes in words."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if name.endswith(("_bytes", "_memory")) and value:
        return f"{value // 2**30} GiB" if value >= 2**30 else f"{value // 2**20} MiB"
    return f"`{written(value)}`"


def written(value: Any) -> str:
    """Returns the value in Python, a text in double quotes."""
    return f'"{value}"' if isinstance(value, str) else repr(value)


def kind(annotation: Any) -> str:
    """Returns a short name of a type: the allowed values of a Literal, list for any tuple."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{written(value)}`" for value in args)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(kind(arg) for arg in args if arg is not type(None)))
    if hasattr(annotation, "__metadata__"):
        return kind(args[0])
    if origin is not None:
        return NAMES.get(origin.__name__, str(origin.__name__))
    return NAMES.get(annotation.__name__, str(annotation.__name__))


def bounds(field: Any) -> str:
    """Returns the range of a number in words, such as ", from 0 to 1"."""
    words = [
        text.format(f"{getattr(item, name):,}")
        for item in field.metadata
        for name, text in BOUNDS.items()
        if getattr(item, name, None) is not None
    ]
    return f", {' '.join(words)}" if words else ""
