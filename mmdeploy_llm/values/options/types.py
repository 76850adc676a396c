"""Types of options that accept several spellings: dtypes, lists of names, hosts, URL schemes."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from os import PathLike
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator

from mmdeploy_llm.values.params.frozen import Accepts

from .budget import A_BUDGET, TokenBudget, is_budget
from .weight_formats import WHOLE_ROW, QuantizationName, quantization_name

DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
}
SHORT = ", ".join(map(repr, DTYPES))
GROUP_STEP = 16  # of columns, of which the kernels read whole ones
DEVICE = re.compile(r"cpu|cuda(:[0-9]+)?")
DOMAIN = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|[0-9a-f:.]*:[0-9a-f:.]*")
SCHEME = re.compile(r"[a-z][a-z0-9+.-]+")
OWN_RULES = frozenset({"http", "https", "file", "local", "data"})  # have options of their own


def _dtype_name(value: Any) -> Any:
    """Turns every spelling of a dtype ("bf16", torch.bfloat16) into its name in torch."""
    name = str(value).removeprefix("torch.")
    is_name = isinstance(value, str) or name != str(value)
    return DTYPES.get(name, name) if is_name else value


def _names(value: Any) -> Any:
    """Turns a comma-separated text or a list into a tuple."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return tuple(value) if isinstance(value, list) else value


def _domains(value: tuple[str, ...]) -> tuple[str, ...]:
    domains = tuple(name.lower().strip("[]").rstrip(".") for name in value)
    for name in domains:
        if not DOMAIN.fullmatch(name):
            raise ValueError(
                f"{name!r} is no host name; write example.com, *.example.com for all hosts "
                "below it, or an IP address: no scheme, port or path"
            )
    return domains


def _schemes(value: tuple[str, ...]) -> tuple[str, ...]:
    schemes = tuple(name.lower().removesuffix("://") for name in value)
    for name in schemes:
        if name in OWN_RULES or not SCHEME.fullmatch(name):
            raise ValueError(
                f"{name!r} cannot be listed; give names of stores such as s3, gs, az (http and "
                "https have allowed_media_domains, files have allowed_media_root)"
            )
    return schemes


def _no_code(value: bool) -> bool:
    if value:
        warnings.warn(
            "trust_remote_code = True is ignored: code that comes with a checkpoint is never run; "
            "a model loads if a plugin or transformers itself supports its architecture",
            UserWarning,
            stacklevel=2,
        )
    return False


def _media_limits(value: Mapping[str, int]) -> Mapping[str, int]:
    for kind, limit in value.items():
        if limit < 0:
            raise ValueError(f"the limit for {kind!r} must be 0 or more")
    return value


def _choices(value: Any) -> Any:
    """Turns "A=x,B=y", or a list of "A=x", into a mapping."""
    if isinstance(value, str | list | tuple):
        pairs = [text.partition("=") for text in _names(value)]
        if not all(middle for _, middle, _ in pairs):
            raise ValueError(f"{value!r} must be NAME=PLUGIN, such as AcmeForCausalLM=acme")
        twice = {name for name, _, _ in pairs if sum(name == each for each, _, _ in pairs) > 1}
        if twice:
            raise ValueError(f"{', '.join(sorted(twice))} is given twice; give it once")
        return {name.strip(): plugin.strip() for name, _, plugin in pairs}
    return value


def _adapters(value: Any) -> Any:
    """Turns "NAME=FOLDER", or a list of these, and paths in a mapping into a mapping of texts."""
    if isinstance(value, str | list | tuple):
        pairs = [
            str(text).partition("=") for text in ([value] if isinstance(value, str) else value)
        ]
        if len({name for name, _, _ in pairs}) < len(pairs):
            raise ValueError(f"{value!r} gives a name twice; give it once")
        value = {name: folder for name, _, folder in pairs}
    if isinstance(value, Mapping):
        value = {name: os.fspath(x) if isinstance(x, PathLike) else x for name, x in value.items()}
        for name, folder in value.items():
            if not (isinstance(name, str) and name.strip() and folder):
                raise ValueError(
                    f"an adapter {name!r} of {folder!r}: give a name and a folder, or an id on the "
                    'hub, such as {"sql": "adapters/sql"}, or sql=adapters/sql'
                )
    return value


def _no_empty(value: Mapping[str, str]) -> Mapping[str, str]:
    if not all(name.strip() and plugin.strip() for name, plugin in value.items()):
        raise ValueError("names of what is served and of plugins must not be empty")
    return value


def _token_budget(value: Any) -> Any:
    """Reads a number that is written as a text, and refuses what is no budget."""
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if not is_budget(number):
        raise ValueError(f"must be {A_BUDGET}")
    return number


def _group_size(value: int) -> int:
    if value != WHOLE_ROW and (value < GROUP_STEP or value % GROUP_STEP):
        raise ValueError(
            f"a group of {value} columns: give a multiple of {GROUP_STEP}, such as 32, 64 or 128, "
            f"or {WHOLE_ROW} for the whole row"
        )
    return value


def _guided_decoding_backend(value: Any) -> Any:
    """Turns the names of FastDeploy's libraries into "auto", with a warning."""
    if value not in ("guidance", "xgrammar"):
        return value
    warnings.warn(
        f"guided_decoding_backend = {value!r} is ignored: llguidance compiles every constraint; "
        "leave the option out",
        UserWarning,
        stacklevel=2,
    )
    return "auto"


def _device(value: str) -> str:
    if value != "auto" and not DEVICE.fullmatch(value):
        raise ValueError(f"{value!r} is not known; use cpu, cuda or cuda:N")
    return value


CpuLevel = Literal[
    "amx",
    "avx512_bf16",
    "avx512_vnni",
    "avx512",
    "avx2_vnni",
    "avx2",
    "neon_bf16",
    "neon_i8mm",
    "neon_dot",
    "portable",
]
DType = Annotated[
    Literal["auto", "bfloat16", "float16", "float32"],
    BeforeValidator(_dtype_name),
    Accepts(f"Literal['auto', 'bfloat16', 'float16', 'float32', {SHORT}] | torch.dtype"),
]
Quantization = Annotated[QuantizationName, BeforeValidator(quantization_name), Accepts("str")]
CacheDType = Annotated[
    Literal["auto", "bfloat16", "float16", "float32", "int8", "int4", "fp8"],
    BeforeValidator(_dtype_name),
    Accepts(
        "Literal['auto', 'bfloat16', 'float16', 'float32', 'int8', 'int4', 'fp8', "
        f"{SHORT}] | torch.dtype"
    ),
]
GroupSize = Annotated[int, AfterValidator(_group_size)]
GuidedDecodingBackend = Annotated[
    Literal["auto", "off"],
    BeforeValidator(_guided_decoding_backend),
    Accepts("Literal['auto', 'off', 'guidance', 'xgrammar']"),
]
Device = Annotated[str, AfterValidator(_device)]
MediaLimits = Annotated[Mapping[str, int], AfterValidator(_media_limits)]
Budget = Annotated[TokenBudget, BeforeValidator(_token_budget)]
Adapters = Annotated[
    Mapping[str, str],
    BeforeValidator(_adapters),
    Accepts("str | Sequence[str] | Mapping[str, str | PathLike[str]]"),
]
NoCode = Annotated[bool, AfterValidator(_no_code)]
Names = Annotated[tuple[str, ...], BeforeValidator(_names), Accepts("str | Sequence[str]")]
NamesOrFiles = Annotated[
    tuple[str, ...], BeforeValidator(_names), Accepts("str | Sequence[str | Path]")
]
Choices = Annotated[
    Mapping[str, str],
    BeforeValidator(_choices),
    AfterValidator(_no_empty),
    Accepts("str | Sequence[str] | Mapping[str, str]"),
]
Domains = Annotated[Names, AfterValidator(_domains)]
Schemes = Annotated[Names, AfterValidator(_schemes)]
