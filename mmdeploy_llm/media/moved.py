"""Keeps names that plugins of earlier versions import from the places where they were."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from mmdeploy_llm import media


def moved(old: str, homes: Mapping[str, str], name: str) -> Any:
    """Returns what the module `old` was asked for, from its home, and warns.

    homes: name -> the module below mmdeploy_llm that has it. Raises AttributeError for other names.
    """
    if name not in homes:
        raise AttributeError(f"module {old!r} has no attribute {name!r}")
    is_public = name in media.__all__
    hint = f"import {name} from mmdeploy_llm.media" if is_public else f"{name} will be removed"
    warnings.warn(f"{old} is deprecated: {hint}", DeprecationWarning, stacklevel=3)
    return getattr(import_module(f"mmdeploy_llm.{homes[name]}"), name)
