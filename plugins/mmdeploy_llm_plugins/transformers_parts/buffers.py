"""Brings parameters and buffers of a transformers model into the form that weights.load fills.

Every tensor that a checkpoint holds is a parameter with one name; every buffer can be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import build_glob_alternation

from mmdeploy_llm.errors import ModelNotSupportedError

MARK = torch.float16  # the model is built in this dtype; buffers that have it follow the weights'
UNSET = -(2**30)


def untie(model: nn.Module) -> Mapping[str, str]:
    """Removes all names of shared parameters but the one that transformers saves: the first that is
    not listed as tied to another. Returns removed name -> kept name."""
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    named = list(model.named_parameters(remove_duplicate=False))
    for name, param in sorted(named, key=lambda item: item[0] in tied):  # a stable order
        kept = first.setdefault(id(param), name)
        if kept != name:
            ties[name] = kept
    for name in ties:
        module, own = _owner(model, name)
        module._parameters[own] = None
    return ties


def retie(model: nn.Module, ties: Mapping[str, str]) -> None:
    """Restores the names that `untie` removed, as the parameters that they were shared with."""
    for name, kept in ties.items():
        module, own = _owner(model, name)
        module._parameters[own] = model.get_parameter(kept)


def prepare(model: Any, part: nn.Module | None = None) -> None:
    """Makes parameters of the buffers that checkpoints hold, and marks what must stay float32: what
    the model makes so, whatever dtype it is built in, and what patterns of its class find.
    part: a module beside those of the model, which is prepared in place of these."""
    is_wide = _finder(model._keep_in_fp32_modules_strict)
    is_wide_in_float16 = _finder(model._keep_in_fp32_modules)
    prepared: Any = model if part is None else part
    for path, module in prepared.named_modules():
        for own, buffer in list(module.named_buffers(recurse=False)):
            is_kept = own not in module._non_persistent_buffers_set
            if is_kept and buffer.is_floating_point():
                del module._buffers[own]
                setattr(module, own, nn.Parameter(buffer, requires_grad=False))
        params = dict(module.named_parameters(recurse=False))
        module.fp32_parameters = tuple(
            name
            for name, param in params.items()
            if param.dtype == torch.float32 or is_wide(f"{path}.{name}")
        )
        module.fp32_parameters_of_float16 = tuple(
            name for name in params if is_wide_in_float16(f"{path}.{name}")
        )


def _finder(patterns: Collection[str] | None) -> Callable[[str], object]:
    """Returns what finds one of transformers' patterns in the name of a parameter."""
    return build_glob_alternation(sorted(patterns))[0].search if patterns else lambda _: None


def compute(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Allocates all buffers and fills them by transformers' own initialisation. dtype: that of the
    weights, which buffers follow.

    Raises ModelNotSupportedError when that leaves one unset.
    """
    for module in model.modules():
        for own, buffer in module.named_buffers(recurse=False):
            kind = dtype if buffer.dtype == MARK else buffer.dtype
            module._buffers[own] = torch.full(buffer.shape, _unset(kind), dtype=kind, device=device)
    for param in model.parameters():
        param._is_hf_initialized = True
    for module in model.modules():
        module._is_hf_initialized = False
    model.initialize_weights()
    for module in model.modules():
        if hasattr(module, "config"):
            _set_dtype(module.config, dtype)
    empty = [name for name, buffer in model.named_buffers() if _is_unset(buffer)]
    if empty:
        raise ModelNotSupportedError(
            f"transformers_any cannot run {type(model).__name__}: transformers does not compute "
            f"its buffer {empty[0]}; use a plugin made for this model"
        )


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, own = name.rpartition(".")
    return model.get_submodule(path), own


def _unset(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return False
    return float("nan") if dtype.is_floating_point or dtype.is_complex else UNSET


def _is_unset(buffer: torch.Tensor) -> bool:
    if not buffer.numel() or buffer.dtype == torch.bool:
        return False
    if buffer.is_floating_point() or buffer.is_complex():
        return bool(buffer.isnan().all())
    return bool((buffer == UNSET).all())


def _set_dtype(config: Any, dtype: torch.dtype) -> None:
    if getattr(config, "dtype", None) == MARK:
        config.dtype = dtype
