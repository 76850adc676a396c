"""The libraries that attention backends call: how to import and to install them. None is imported
before a backend is built."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mmdeploy_llm.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A library that computes attention.

    module: the module with its functions.
    marker: a module that only this library has, looked up to detect it without an import.
    install: what to do if it is missing.
    parameters: names that the first function must accept.
    """

    module: str
    marker: str
    functions: tuple[str, ...]
    install: str
    parameters: tuple[str, ...] = ()


LIBRARIES: Mapping[str, Library] = MappingProxyType(
    {
        "flash-attn": Library(
            module="flash_attn",
            marker="flash_attn_2_cuda",
            functions=("flash_attn_varlen_func", "flash_attn_with_kvcache"),
            install="pip install mmdeploy-llm[cuda]",
        ),
        "flash-attn-3": Library(
            module="flash_attn_interface",
            marker="flash_attn_interface",
            functions=("flash_attn_with_kvcache",),
            install="build it from the folder hopper/ of flash-attention",
            parameters=("page_table", "cu_seqlens_q", "cache_seqlens"),
        ),
        "flash-attn-4": Library(
            module="flash_attn.cute",
            marker="flash_attn.cute",
            functions=("flash_attn_varlen_func",),
            install="pip install --pre flash-attn-4",
            parameters=("page_table", "seqused_k", "learnable_sink"),
        ),
        "torch-varlen": Library(
            module="torch.nn.attention.varlen",
            marker="torch.nn.attention.varlen",
            functions=("varlen_attn",),
            install="install torch 2.13",
            parameters=("block_table", "seqused_k"),
        ),
        "triton": Library(
            module="mmdeploy_llm.kernels.cuda.paged",
            marker="triton",
            functions=(),
            install="pip install 'triton>=3.6,<3.10'",
        ),
    }
)


def is_installed(name: str) -> bool:
    """Whether the library is installed, in a version that the backend can use."""
    library = LIBRARIES[name]
    try:
        if importlib.util.find_spec(library.marker) is None:
            return False
        # torch is imported anyway, and only its function shows which parameters it takes.
        return name != "torch-varlen" or _missing(library, load(name)[0]) is None
    except (ConfigError, ImportError, ValueError):  # ValueError: a module without a spec
        return False


def problem(name: str) -> str | None:
    """Returns that the library is missing, and what to do; None if it is installed."""
    if is_installed(name):
        return None
    return f"is not installed: {LIBRARIES[name].install}, or use another backend"


def load(name: str) -> tuple[Callable[..., Any], ...]:
    """Imports the library's functions. Raises ConfigError when it cannot be imported or is too
    old."""
    library = LIBRARIES[name]
    try:
        module = importlib.import_module(library.module)
        functions = tuple(getattr(module, function) for function in library.functions)
    except (ImportError, AttributeError, OSError) as error:
        raise ConfigError(
            f"attention_backend = {name!r}, but it cannot be imported ({error}); "
            f"{library.install}, or use another backend"
        ) from error
    missing = _missing(library, functions[0]) if functions else None
    if missing:
        raise ConfigError(
            f"attention_backend = {name!r}, but {library.functions[0]} of {library.module} takes "
            f"no {missing}: it is too old or too new; {library.install}, or use another backend"
        )
    return functions


def _missing(library: Library, function: Callable[..., Any]) -> str | None:
    """Returns the first parameter that the function does not accept; None if it accepts all."""
    accepted = inspect.signature(function).parameters
    return next((name for name in library.parameters if name not in accepted), None)
