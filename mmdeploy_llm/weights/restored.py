"""Builds a model whose weights come, packed, from elsewhere than its checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.hooks import Checkpoint

from .load import Split, init_buffers, on_meta


def restored_model(
    factory: Callable[[Any], Any],
    checkpoint: Checkpoint,
    device: torch.device,
    split: Split | None,
    restore: Callable[[nn.Module], bool],
) -> Any:
    """Builds `factory(checkpoint.config)` as build_model does, with the weights that `restore`
    gives it; None where that returns False, and where the model cannot be completed without its
    weights in their own layout. split: see build_model."""
    model = on_meta(factory, checkpoint)
    if split is not None:
        split(model)
    if not restore(model):
        return None
    try:
        init_buffers(model, device)
    except ModelNotSupportedError:  # it needs weights that are packed
        return None
    return model.eval()
