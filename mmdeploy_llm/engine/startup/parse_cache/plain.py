"""Writes values as JSON that says their types, and reads them again."""

from __future__ import annotations

from typing import Any

import torch

from mmdeploy_llm.weights.cache import NotKeptError

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
