"""The backend with flash-attn 4, for Hopper and newer: a fast prefill. On Hopper it does not split
contexts, so a decode step of few sequences would leave most of the GPU idle: our Triton kernels
compute decode."""

from __future__ import annotations

from torch import Tensor

from . import libraries
from .varlen import Call, Options, VarlenBackend
from .writing import CacheWriter, write_plain


class FlashAttention4(VarlenBackend):
    """Calls flash-attn 4. decode: another backend for decode calls; None: flash-attn 4 computes
    them. Raises ConfigError when flash-attn 4 is not installed."""

    name = "flash-attn-4"
    has_sinks = True

    def __init__(
        self, write: CacheWriter = write_plain, decode: VarlenBackend | None = None
    ) -> None:
        super().__init__(write)
        self._decode = decode
        (self._varlen,) = libraries.load(self.name)

    def compute(
        self, call: Call, q: Tensor, keys: Tensor, values: Tensor, options: Options
    ) -> Tensor:
        """Calls the library, or the backend for decode calls; see VarlenBackend. Pages may have any
        size. Rows after a sequence's end in its last page must be finite: the cache is zeroed."""
        if call.is_decode and self._decode is not None:
            return self._decode.compute(call, q, keys, values, options)
        found = self._varlen(
            q,
            keys,
            values,
            cu_seqlens_q=call.starts,
            max_seqlen_q=call.max_query,
            max_seqlen_k=call.max_context,
            seqused_k=call.context_lens,
            page_table=call.tables,
            softmax_scale=options.scale,
            causal=call.is_causal,
            window_size=options.window(call, None),
            learnable_sink=_in_bf16(options.sinks),
            softcap=options.softcap or 0.0,
        )
        out: Tensor = found[0] if isinstance(found, tuple) else found  # a tuple has log-sums too
        return out


def _in_bf16(sinks: Tensor | None) -> Tensor | None:
    """Returns the sinks in the only dtype that the library takes."""
    return None if sinks is None else sinks.bfloat16()
