"""dtype_of: which parameters are wider than their model."""

from __future__ import annotations

import torch
from torch import nn


def dtype_of(module: nn.Module, name: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of a module's parameter in a model of `dtype`: float32 for those that its
    attribute `fp32_parameters` names, and in float16 for those of `fp32_parameters_of_float16`."""
    wide = getattr(module, "fp32_parameters", ())
    if dtype is torch.float16:
        wide = (*wide, *getattr(module, "fp32_parameters_of_float16", ()))
    return torch.float32 if name in wide else dtype
