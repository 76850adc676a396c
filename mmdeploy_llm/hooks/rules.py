"""The rules that fields of specs keep, as models of pydantic: the description of a field says what
is allowed. Imported where the first spec is checked: pydantic takes a while to import."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model

from mmdeploy_llm.hooks.objects.attention import AttentionBackendSpec
from mmdeploy_llm.hooks.objects.chat_parts import CHAT_PART_TYPE, OWN_TYPES, ChatPartSpec, are_keys
from mmdeploy_llm.hooks.objects.logits import LogitsProcessorSpec
from mmdeploy_llm.hooks.objects.model_files import ModelFileSpec
from mmdeploy_llm.hooks.objects.reading import ReadingPreset
from mmdeploy_llm.hooks.objects.store import (
    OUTPUT_CONTENTS,
    OUTPUT_OPTIONS,
    CorpusFormatSpec,
    OutputContent,
    OutputOption,
    OutputSinkSpec,
)
from mmdeploy_llm.hooks.objects.weights import WeightFormatSpec
from mmdeploy_llm.messages import MEDIA_KIND
from mmdeploy_llm.values.first_bytes import HEAD

from .contracts import MediaProcessorSpec, ModelSpec, ReasoningParserSpec, ToolParserSpec
from .records import Spec

TpKind = Literal[
    "colwise",
    "heads",
    "rowwise",
    "experts",
    "vocab",
    "whole",
    "rowwise-partial",
    "experts-partial",
    "sum",
]
Dtype = Literal["bfloat16", "float16", "float32"]
CacheDtype = Literal["bfloat16", "float16", "float32", "int8", "int4", "float8_e4m3fn"]
_PATH = r"[^\W\d]\w*(\.[^\W\d]\w*)*"


def _form(pattern: str) -> Any:
    """Says that a text matches a pattern as a whole."""
    return Field(pattern=rf"\A(?:{pattern})\Z")


def _fits_head(begin: tuple[int, bytes]) -> tuple[int, bytes]:
    if begin[0] + len(begin[1]) > HEAD:
        raise ValueError(f"it ends after the first {HEAD} bytes")
    return begin


def _are_keys(value: Mapping[Any, Any]) -> Mapping[Any, Any]:
    if not are_keys(value):
        raise ValueError("a key has no name, or a type that JSON does not have")
    return value


# One byte alone would begin files of every kind.
_Begin = Annotated[bytes, Field(min_length=2, max_length=HEAD)]
_BeginAt = Annotated[
    tuple[Annotated[int, Field(ge=0)], Annotated[bytes, Field(min_length=2)]],
    AfterValidator(_fits_head),
]
_Word = Annotated[str, _form(r"(?s:.*\S.*)")]
_Reference = Annotated[str, _form(f"{_PATH}:{_PATH}")]
_KindWord = Annotated[str, _form(MEDIA_KIND.pattern)]
_Suffix = Annotated[str, _form(r"(\.[^\s./\\A-Z]+)+")]
_ChatType = Annotated[str, _form(CHAT_PART_TYPE.pattern)]
_PartType = Annotated[str, _form(r"(?!text$)[a-z][a-z0-9_]*")]
_Some = Field(min_length=1)

Name = Annotated[_Word, Field(description="a text that is not empty")]
Factory = Annotated[_Reference, Field(description='"module:Attribute"')]
Priority = Annotated[int, Field(description="an int")]
Flag = Annotated[bool, Field(description="a bool")]
Text = Annotated[str, Field(description="a text")]
TextOrNone = Annotated[str | None, Field(description="a text or None")]
Count = Annotated[int, Field(gt=0, description="a whole number above 0")]
CountOrNone = Annotated[
    Annotated[int, Field(gt=0)] | None, Field(description="None or a whole number above 0")
]
Names = Annotated[tuple[_Word, ...], Field(description="a tuple of texts")]
SomeNames = Annotated[tuple[_Word, ...], _Some, Field(description="a tuple of at least one text")]
NameOrNone = Annotated[_Word | None, Field(description="a parser's name or None")]
FunctionOrNone = Annotated[_Reference | None, Field(description='"module:function" or None')]
SomeSuffixes = Annotated[
    tuple[_Suffix, ...],
    _Some,
    Field(description="a tuple of at least one suffix in small letters, such as '.warc.gz'"),
]
Begins = Annotated[
    tuple[_Begin | _BeginAt, ...],
    Field(
        description=f"a tuple of 2 bytes or more, or of (offset, bytes), within the first {HEAD}"
    ),
]
Capability = Annotated[tuple[int, int] | None, Field(description="a tuple such as (9, 0) or None")]
Keys = Annotated[
    Mapping[Any, Any],
    AfterValidator(_are_keys),
    Field(
        description="a mapping of names, not 'type', to str, int, float, bool, list, dict or object"
    ),
]
KIND = "a lower-case word such as 'image', 'video' or one of your own (not 'text')"


class _Rules(BaseModel):
    """The fields of every spec; those without a rule are not checked."""

    model_config = ConfigDict(strict=True, from_attributes=True, regex_engine="python-re")

    name: Name
    priority: Priority


class _Made(_Rules):
    factory: Factory


class _Parser(_Made):
    aliases: Names


class _Model(_Made):
    architectures: SomeNames
    media: Annotated[
        tuple[_KindWord, ...],
        Field(description="a tuple of lower-case words such as 'image' and 'video' (not 'text')"),
    ]
    reasoning: NameOrNone
    tools: NameOrNone
    atomic_media: Flag
    refuses: FunctionOrNone
    gguf: Annotated[_Reference | None, Field(description='"module:TABLE" or None')]
    tiny: Annotated[_Reference | None, Field(description='"module:FAMILY" or None')]
    tp_plan: Annotated[
        Mapping[_Word, TpKind],
        Field(description=f"a mapping of module names to {get_args(TpKind)}"),
    ]


class _Logits(_Parser):
    arguments: Names


class _Preset(_Rules):
    aliases: Names
    architectures: SomeNames
    marks: Names
    tasks: Annotated[
        Mapping[_Word, str],
        _Some,
        Field(description="a mapping of one task or more to prompts"),
    ]
    system: TextOrNone
    image_tokens: Annotated[
        Annotated[int, Field(gt=0)] | Literal["auto", "full"] | None,
        Field(description="a number, 'auto', 'full' or None"),
    ]
    dpi: Count
    longest_side: CountOrNone
    max_tokens: Count
    sampling: Annotated[Mapping[Any, Any], Field(description="a mapping")]
    convert: FunctionOrNone
    source: Text


class _Corpus(_Rules):
    suffixes: SomeSuffixes
    reader: Annotated[_Reference, Field(description='"module:function"')]
    first_bytes: Begins


class _Output(_Made):
    suffixes: SomeSuffixes
    holds: Annotated[
        tuple[OutputContent, ...],
        _Some,
        Field(description=f"a tuple of at least one of {OUTPUT_CONTENTS}"),
    ]
    options: Annotated[
        tuple[OutputOption, ...],
        Field(description=f"a tuple of some of {OUTPUT_OPTIONS}"),
    ]


class _Attention(_Parser):
    devices: SomeNames
    dtypes: Annotated[
        tuple[Dtype, ...],
        _Some,
        Field(description="a tuple of 'bfloat16', 'float16', 'float32'"),
    ]
    cache_dtypes: Annotated[
        tuple[CacheDtype, ...], Field(description=f"a tuple of some of {get_args(CacheDtype)}")
    ]
    max_head_dim: CountOrNone
    head_multiple: Count
    block_multiple: Count
    block_size: Count
    min_capability: Capability
    below_capability: Capability
    available: FunctionOrNone


class _Weights(_Parser):
    suffixes: SomeNames
    ignored: Names
    quantise: FunctionOrNone


class _ModelFile(_Made):
    first_bytes: Annotated[Begins, _Some]
    file_names: Names


class _ChatPart(_Made):
    types: Annotated[
        tuple[_ChatType, ...],
        _Some,
        Field(description=f"a tuple of at least one word in small letters, none of {OWN_TYPES}"),
    ]
    keys: Keys
    optional: Keys
    models: SomeNames
    files: Names
    late: Flag


class _Media(_Made):
    kind: Annotated[_KindWord, Field(description=KIND)]
    models: SomeNames
    suffixes: Annotated[
        tuple[_Suffix, ...],
        Field(description="a tuple of suffixes in small letters, such as '.wav'"),
    ]
    columns: Names
    first_bytes: Begins
    part_types: Annotated[
        tuple[_PartType, ...],
        Field(description="a tuple of words in small letters such as 'input_audio' (not 'text')"),
    ]
    part_text: Annotated[
        Annotated[str, _Some] | None, Field(description="a text that is not empty or None")
    ]
    yields: Annotated[_KindWord | None, Field(description=f"{KIND} or None")]


FLAGS: Any = {own.name: (Flag, ...) for own in fields(AttentionBackendSpec) if own.type == "bool"}
RULES: Mapping[type[Spec], type[_Rules]] = MappingProxyType(
    {
        ModelSpec: _Model,
        ReasoningParserSpec: _Parser,
        ToolParserSpec: _Parser,
        LogitsProcessorSpec: _Logits,
        ReadingPreset: _Preset,
        CorpusFormatSpec: _Corpus,
        OutputSinkSpec: _Output,
        AttentionBackendSpec: create_model("_AttentionWithFlags", __base__=_Attention, **FLAGS),
        WeightFormatSpec: _Weights,
        ModelFileSpec: _ModelFile,
        ChatPartSpec: _ChatPart,
        MediaProcessorSpec: _Media,
    }
)


def broken(spec: Spec, shown: Callable[[object], str]) -> Iterator[str]:
    """Yields the fields of a spec that break their rules, each with what is allowed and, as
    `shown`, what was found."""
    rules = RULES[type(spec)]
    try:
        rules.model_validate(spec)
    except ValidationError as error:
        for field in dict.fromkeys(str(own["loc"][0]) for own in error.errors()):
            allowed = rules.model_fields[field].description
            yield f"{field} must be {allowed}, got {shown(getattr(spec, field))}"
