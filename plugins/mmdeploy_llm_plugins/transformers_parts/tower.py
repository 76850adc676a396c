"""TransformersTower: an encoder of transformers inside a model of the engine."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from mmdeploy_llm.errors import ModelNotSupportedError

from . import buffers
from .linear import use_engine_layers


class TransformersTower(nn.Module):
    """Holds transformers' module of `config` as `inner`, with weights that the loader fills and
    buffers that transformers computes. tower: its class; None: that of transformers' AutoModel.

    Raises ModelNotSupportedError for a config that transformers cannot use.
    """

    def __init__(self, config: Any, tower: Any = None) -> None:
        super().__init__()
        try:
            made: Any = (
                transformers.AutoModel.from_config(
                    config, dtype=buffers.MARK, trust_remote_code=False
                )
                if tower is None
                else tower._from_config(config, dtype=buffers.MARK)
            )
        except Exception as error:  # transformers' code: anything may come
            raise ModelNotSupportedError(
                f"transformers cannot make a tower from this {type(config).__name__}: "
                f"{type(error).__name__}: {error}"
            ) from error
        self.inner: Any = made.eval()
        use_engine_layers(self.inner)
        buffers.prepare(self.inner)

    def init_buffers(self, device: torch.device) -> None:
        """Computes what no checkpoint holds."""
        buffers.compute(self.inner, device, self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        kinds = {param.dtype for param in self.inner.parameters()}  # some stay float32
        return next((kind for kind in kinds if kind != torch.float32), torch.float32)
