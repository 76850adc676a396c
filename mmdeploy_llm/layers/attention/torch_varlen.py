"""The backend with torch's own attention over ragged batches, which is flash-attn 2 in the torch
wheel: nothing to install, the same block sizes, no softcap."""

from __future__ import annotations

from torch import Tensor

from mmdeploy_llm.errors import ModelNotSupportedError

from . import libraries
from .flash import BLOCK_MULTIPLE
from .varlen import Call, Options, VarlenBackend
from .writing import CacheWriter, write_plain


class TorchVarlenAttention(VarlenBackend):
    """Calls torch's varlen_attn. Raises ConfigError if this version of torch has none with block
    tables."""

    name = "torch-varlen"

    def __init__(self, write: CacheWriter = write_plain) -> None:
        super().__init__(write)
        (self._varlen,) = libraries.load(self.name)

    def check(self, layer: int, options: Options) -> None:
        """Raises ModelNotSupportedError for a softcap or sinks."""
        super().check(layer, options)
        if options.softcap is not None:
            raise ModelNotSupportedError(
                f"layer {layer} caps its attention scores (softcap = {options.softcap}), which "
                "torch-varlen cannot compute; use attention_backend='triton' or 'flash-attn'"
            )

    def compute(
        self, call: Call, q: Tensor, keys: Tensor, values: Tensor, options: Options
    ) -> Tensor:
        """Calls varlen_attn; see VarlenBackend. Blocks have a multiple of 256 tokens. A window of
        (-1, 0) means causal attention. Cumulative key lengths are required, although seqused_k is
        what is read."""
        assert keys.shape[1] % BLOCK_MULTIPLE == 0, "select() checks block sizes"
        out: Tensor = self._varlen(
            q,
            keys,
            values,
            call.starts,
            call.key_starts,
            call.max_query,
            call.max_context,
            scale=options.scale,
            window_size=options.window(call, -1),
            enable_gqa=q.shape[1] != keys.shape[2],
            seqused_k=call.context_lens,
            block_table=call.tables,
        )
        return out
