"""The backend with flash-attn 2: prefill by its varlen function, decode by the one for KV caches,
which packs the query heads of a key head and splits long contexts."""

from __future__ import annotations

from torch import Tensor

from . import libraries
from .varlen import Call, Options, VarlenBackend
from .writing import CacheWriter, write_plain

BLOCK_MULTIPLE = 256  # block sizes of a paged cache are multiples of 256 tokens


class FlashAttention(VarlenBackend):
    """Calls flash-attn 2. Raises ConfigError when flash-attn 2 is not installed."""

    name = "flash-attn"

    def __init__(self, write: CacheWriter = write_plain) -> None:
        super().__init__(write)
        self._varlen, self._with_cache = libraries.load(self.name)

    def compute(
        self, call: Call, q: Tensor, keys: Tensor, values: Tensor, options: Options
    ) -> Tensor:
        """Calls the library's function for decode or for prefill; see VarlenBackend. Blocks have a
        multiple of 256 tokens."""
        assert keys.shape[1] % BLOCK_MULTIPLE == 0, "select() checks block sizes"
        shared = {
            "block_table": call.tables,
            "softmax_scale": options.scale,
            "causal": call.is_causal,
            "window_size": options.window(call, -1),
            "softcap": options.softcap or 0.0,
        }
        if call.is_decode:
            out: Tensor = self._with_cache(
                q[:, None], keys, values, cache_seqlens=call.context_lens, **shared
            )
            return out[:, 0]
        out = self._varlen(
            q,
            keys,
            values,
            cu_seqlens_q=call.starts,
            cu_seqlens_k=call.key_starts,
            max_seqlen_q=call.max_query,
            max_seqlen_k=call.max_context,
            **shared,
        )
        return out
